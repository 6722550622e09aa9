// ---- The head of the page: what is opened, and the choices that hold for all panes.

class HeaderPane {
  constructor(page) {
    this.page = page;
    this.inputs = page.root.querySelectorAll("fieldset.choice input");
    for (const input of this.inputs) {
      input.addEventListener("change", () => page.choose({ [input.name]: input.value }));
    }
  }

  paint({ layer }) {
    const { view } = this.page;
    for (const input of this.inputs) input.checked = view[input.name] === input.value;
    this.page.find("where").textContent =
      `${headName(this.page, view)} · ${layer.name} · ${layer.kind} attention`;
  }
}
