// ---- Light or dark: the system's, or the chosen one. Print is light.

export class Theme {
  constructor(host, changed) {
    this.host = host;
    this.chosen = null; // "light" or "dark"; null: as the system
    this.system = matchMedia("(prefers-color-scheme: dark)");
    this.print = matchMedia("print");
    const set = () => {
      this.known = null;
      host.dataset.theme = this.dark ? "dark" : "light";
      changed();
    };
    this.system.addEventListener("change", set);
    this.print.addEventListener("change", set);
    this.choose = (name) => {
      this.chosen = name;
      set();
    };
    this.close = () => {
      this.system.removeEventListener("change", set);
      this.print.removeEventListener("change", set);
    };
    host.dataset.theme = this.dark ? "dark" : "light";
  }

  get dark() {
    if (this.print.matches) return false;
    return this.chosen === null ? this.system.matches : this.chosen === "dark";
  }

  /** The colours of the theme for canvases, which know no CSS. */
  get colours() {
    const style = getComputedStyle(this.host);
    const names = ["ink", "quiet", "line", "accent", "bar", "hatch", "panel"];
    this.known ??= Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    return this.known;
  }
}
