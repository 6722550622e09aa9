// ---- A report in a notebook: the same panes, with data that the kernel sends a block at a time.

import { messageSource, Run } from "./data.js";
import { mount, templateOf } from "./mount.js";

/** @import { Said, WidgetModel } from "./types.d.ts" */

const PATIENCE = 10; // seconds without an answer until the reader is told

/** The theme of the notebook around: JupyterLab and Visual Studio Code say it on the body. Null: as the system. */
function themeAround() {
  const { jpThemeLight } = document.body.dataset;
  if (jpThemeLight !== undefined) return jpThemeLight === "true" ? "light" : "dark";
  const found = /vscode-(light|dark)/.exec(document.body.className);
  return found ? (found[1] === "light" ? "light" : "dark") : null;
}

/**
 * Asks the kernel for blocks. `say` is called with a notice for the reader, or with "" when the notice is over.
 *
 * @param {WidgetModel} model
 * @param {(text: string) => void} say
 */
function messages(model, say) {
  const waiting = new Map();
  /**
   * @param {Said} said
   * @param {DataView<ArrayBuffer>[]} buffers
   */
  const found = (said, buffers) => {
    waiting.get(said.block)?.({ said, bytes: buffers[0] });
    waiting.delete(said.block);
  };
  model.on("msg:custom", found);
  /** @param {number} block */
  const ask = async (block) => {
    const answer = new Promise((resolve) => { waiting.set(block, resolve); });
    const timer = setTimeout(() => say("The kernel does not answer: it is busy, or it has ended. seen.view() without " +
      ".widget() is a page that needs none."), 1000 * PATIENCE);
    model.send({ block });
    const { said, bytes } = await answer;
    clearTimeout(timer);
    say(said.error ? `This report cannot be shown in full: ${said.error}.` : "");
    if (said.error) throw new Error(said.error);
    return bytes;
  };
  return { ask, close: () => model.off("msg:custom", found) };
}

/**
 * The function that `anywidget` calls for each place where the widget is shown. It returns the function for its removal.
 *
 * @param {{ model: WidgetModel, el: HTMLElement }} given
 */
function render({ model, el }) {
  const host = document.createElement("div");
  const notice = document.createElement("p");
  /** @param {string} text */
  const say = (text) => {
    notice.textContent = text;
    notice.hidden = !text;
  };
  say("");
  notice.setAttribute("role", "status");
  host.className = "clearhead";
  host.dataset.lmSuppressShortcuts = "true"; // else the notebook would take the report's keys too: b adds a cell
  host.style.cssText = `height: ${model.get("height")}px; min-height: 0; overflow: auto`;
  el.append(notice, host);
  const channel = messages(model, say);
  const page = mount(host, new Run(messageSource(JSON.parse(model.get("meta")), channel.ask)), templateOf(MARKUP));
  page.find("print").hidden = true; // the button would print the notebook
  page.onaddress = (address) => {
    model.set("address", address);
    model.save_changes();
  };
  const go = () => model.get("address") !== page.view.address && page.go(model.get("address"));
  const theme = () => page.theme.choose(themeAround());
  const around = new MutationObserver(theme);
  around.observe(document.body, { attributes: true, attributeFilter: ["class", "data-jp-theme-light"] });
  model.on("change:address", go);
  theme();
  page.go(model.get("address"));
  return () => {
    around.disconnect();
    model.off("change:address", go);
    channel.close();
    page.close();
  };
}

export default { render };
