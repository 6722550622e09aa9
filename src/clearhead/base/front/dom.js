// ---- Elements of a page: how they are made, and found.

/**
 * An element with a class and text: the one way in which words get onto a page.
 *
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {string} [className]
 * @param {string} [text]
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

/**
 * An element of SVG with attributes and text.
 *
 * @template {keyof SVGElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, string | number>} attributes
 * @param {string | number} [text]
 * @returns {SVGElementTagNameMap[Tag]}
 */
export function draw(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  if (text !== undefined) element.textContent = String(text);
  return element;
}

/**
 * The element with an id, which is of this kind.
 *
 * @template {Element} [Kind=HTMLElement]
 * @param {Document | DocumentFragment} root
 * @param {string} id
 * @param {new () => Kind} [kind]
 */
export function elementIn(root, id, kind) {
  const wanted = kind ?? HTMLElement;
  const element = root.getElementById(id);
  if (!(element instanceof wanted)) throw new Error(`#${id} is no ${wanted.name}`);
  return /** @type {Kind} */ (/** @type {Element} */ (element));
}

/**
 * All elements of this kind that a selector names.
 *
 * @template {Element} Kind
 * @param {ParentNode} root
 * @param {string} selector
 * @param {new () => Kind} kind
 */
export const everyIn = (root, selector, kind) =>
  Array.from(root.querySelectorAll(selector)).flatMap((element) => (element instanceof kind ? [element] : []));

/**
 * The first element of this kind that a selector names.
 *
 * @template {Element} Kind
 * @param {ParentNode} root
 * @param {string} selector
 * @param {new () => Kind} kind
 */
export function firstIn(root, selector, kind) {
  const [element] = everyIn(root, selector, kind);
  if (!element) throw new Error(`no ${kind.name} is ${selector}`);
  return element;
}

/**
 * The context that draws on a canvas.
 *
 * @param {HTMLCanvasElement} canvas
 */
export function penOf(canvas) {
  const pen = canvas.getContext("2d");
  if (!pen) throw new Error("this browser cannot draw (no canvas)");
  return pen;
}

/**
 * The element that an event is about, or one around it, that fits a selector.
 *
 * @param {EventTarget | null} target
 * @param {string} selector
 */
export function closestTo(target, selector) {
  const found = target instanceof Element ? target.closest(selector) : null;
  return found instanceof HTMLElement ? found : null;
}

/**
 * Whether a key with Control, Meta or Alt is pressed: such a key is the browser's.
 *
 * @param {KeyboardEvent | MouseEvent} event
 */
export const withModifier = (event) => event.ctrlKey || event.metaKey || event.altKey;

/**
 * Whether a click follows a link here: others open it in another tab or window.
 *
 * @param {MouseEvent} event
 */
export const isPlainClick = (event) => event.button === 0 && !event.shiftKey && !withModifier(event);

/**
 * Scrolls `element` into sight within its own box; the page itself stays where it is.
 *
 * @param {HTMLElement} box
 * @param {Element} element
 */
export function revealIn(box, element) {
  const outer = box.getBoundingClientRect();
  const inner = element.getBoundingClientRect();
  if (inner.top < outer.top || inner.bottom > outer.bottom) {
    box.scrollTop += inner.top - outer.top - outer.height / 2;
  }
}

/** @type {Record<string, [number, number]>} where an arrow key leads: rows down, columns to the right */
export const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

/**
 * Listens to keys in a shadow root, whose events have no type of their own.
 *
 * @param {ShadowRoot} root
 * @param {(event: KeyboardEvent) => void} listener
 */
export const onKey = (root, listener) =>
  root.addEventListener("keydown", (event) => event instanceof KeyboardEvent && listener(event));
