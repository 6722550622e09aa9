// ---- Light or dark: the system's, or the chosen one. Print is light.

const COLOURS = /** @type {const} */ (["ink", "quiet", "line", "accent", "bar", "hatch", "panel"]);

/** @typedef {Record<typeof COLOURS[number], string>} Colours the colours of a theme, for canvases, which know no CSS */

/** The chosen theme stands in `data-theme` of an element. */
export class Theme {
  /**
   * @param {HTMLElement} host
   * @param {() => void} changed called when the theme has changed
   */
  constructor(host, changed) {
    this.host = host;
    /** @type {"light" | "dark" | null} null: as the system */
    this.chosen = null;
    this.system = matchMedia("(prefers-color-scheme: dark)");
    this.print = matchMedia("print");
    /** @type {Colours | null} */
    this.known = null;
    this.set = () => {
      this.known = null;
      host.dataset.theme = this.dark ? "dark" : "light";
      changed();
    };
    this.system.addEventListener("change", this.set);
    this.print.addEventListener("change", this.set);
    host.dataset.theme = this.dark ? "dark" : "light";
  }

  /** @param {"light" | "dark" | null} name */
  choose(name) {
    this.chosen = name;
    this.set();
  }

  /** The other one than the system's, and back. */
  turn() {
    this.choose(this.chosen !== null ? null : this.system.matches ? "light" : "dark");
  }

  close() {
    this.system.removeEventListener("change", this.set);
    this.print.removeEventListener("change", this.set);
  }

  get dark() {
    if (this.print.matches) return false;
    return this.chosen === null ? this.system.matches : this.chosen === "dark";
  }

  /** @returns {Colours} */
  get colours() {
    const style = getComputedStyle(this.host);
    const read = () => Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.known ??= /** @type {Colours} */ (read());
    return this.known;
  }
}
