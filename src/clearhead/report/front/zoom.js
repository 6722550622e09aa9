// ---- Gestures on the map: wheel, drag, pinch, double click and keys become zooming, moving, pointing and choosing.

/** @import { Moves, Point } from "./types.d.ts" */

const NOTCH = 100; // the distance of a wheel for one step
const STILL = 5; // CSS pixels that a pointer may move in a click

/**
 * `does`: the actions. `zoom(step, point)` in steps of the scale, `zoomTo(factor, point)`; `scale()` in pixels a token, and
 * `scaleTo(pixels, point)`; `drag(x, y)` by so many pixels, `point(point)` or null, `choose(point)`, `free()` whether there is room to zoom in a direction.
 * Points are CSS pixels from the corner of the element.
 */
export class Gestures {
  /**
   * @param {HTMLElement} element
   * @param {Moves} does
   */
  constructor(element, does) {
    this.element = element;
    this.does = does;
    /** @type {Map<number, Point>} */
    this.pointers = new Map();
    this.turned = 0;
    this.moved = false;
    /** @type {Point} where the last finger went down */
    this.start = [0, 0];
    this.pinched = 1; // the scale over the distance of two fingers
    element.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    element.addEventListener("pointerdown", (event) => this.press(event));
    element.addEventListener("pointermove", (event) => this.move(event));
    element.addEventListener("pointerup", (event) => this.release(event));
    element.addEventListener("pointercancel", (event) => this.release(event));
    element.addEventListener("pointerleave", () => does.point(null));
    element.addEventListener("click", (event) => this.moved || does.choose(this.pointOf(event)));
    element.addEventListener("dblclick", (event) => does.zoomTo(event.shiftKey ? 0.5 : 2, this.pointOf(event)));
  }

  /**
   * @param {{ clientX: number, clientY: number }} given
   * @returns {Point}
   */
  pointOf({ clientX, clientY }) {
    const box = this.element.getBoundingClientRect();
    return [clientX - box.left, clientY - box.top];
  }

  /**
   * The wheel zooms with Ctrl, which a pinch on a touch pad sets too, or when the map has the focus; else the page scrolls.
   *
   * @param {WheelEvent} event
   */
  wheel(event) {
    const focused = this.element.matches(":focus");
    if (!event.ctrlKey && !event.metaKey && !focused) return;
    const pixels = event.deltaY * (event.deltaMode === 1 ? 33 : event.deltaMode === 2 ? NOTCH : 1);
    const fine = event.ctrlKey && Math.abs(pixels) < 40 ? 6 : 1; // a pinch on a touch pad gives small distances
    if (!event.ctrlKey && !this.does.free(-pixels)) return;
    event.preventDefault();
    if (this.turned * pixels < 0) this.turned = 0;
    this.turned += pixels * fine;
    const steps = Math.trunc(this.turned / NOTCH);
    if (steps === 0) return;
    this.turned -= steps * NOTCH;
    this.does.zoom(-steps, this.pointOf(event));
  }

  /** @param {PointerEvent} event */
  press(event) {
    if (event.button > 0) return;
    if (this.pointers.size === 0) this.moved = false;
    this.pointers.set(event.pointerId, [event.clientX, event.clientY]);
    this.start = [event.clientX, event.clientY];
    if (this.pointers.size === 2) {
      this.moved = true;
      this.pinched = this.does.scale() / this.spread();
    }
  }

  /** The distance of two fingers. */
  spread() {
    const [[x, y], [x2, y2]] = this.pointers.values();
    return Math.max(10, Math.hypot(x - x2, y - y2));
  }

  middle() {
    const all = Array.from(this.pointers.values());
    return [0, 1].map((side) => all.reduce((sum, each) => sum + each[side], 0) / all.length);
  }

  /** @param {PointerEvent} event */
  move(event) {
    const { pointers } = this;
    if (!pointers.has(event.pointerId)) {
      if (pointers.size === 0) this.does.point(this.pointOf(event));
      return;
    }
    const before = this.middle();
    pointers.set(event.pointerId, [event.clientX, event.clientY]);
    if (!this.moved) {
      if (Math.hypot(event.clientX - this.start[0], event.clientY - this.start[1]) < STILL) return;
      this.moved = true;
      this.element.setPointerCapture(event.pointerId);
      this.does.point(null);
    }
    const after = this.middle();
    this.does.drag(after[0] - before[0], after[1] - before[1]);
    if (pointers.size !== 2) return;
    const [clientX, clientY] = after;
    this.does.scaleTo(this.pinched * this.spread(), this.pointOf({ clientX, clientY }));
  }

  /** @param {PointerEvent} event */
  release(event) {
    this.pointers.delete(event.pointerId);
  }
}
