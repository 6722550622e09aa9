// ---- Gestures on the map: wheel, drag, pinch, double click and keys become zooming, moving, pointing and choosing.

const NOTCH = 100; // of a wheel, for one step
const STILL = 5; // CSS pixels that a pointer may move in a click

/**
 * `does`: what follows. `zoom(step, point)` in steps of the scale, `zoomTo(factor, point)`; `scale()` in pixels a token, and
 * `scaleTo(pixels, point)`; `drag(x, y)` by so many pixels, `point(point)` or null, `choose(point)`, `free()` whether there is room to zoom in a direction.
 * Points are CSS pixels from the corner of the element.
 */
export class Gestures {
  constructor(element, does) {
    this.element = element;
    this.does = does;
    this.pointers = new Map();
    this.turned = 0;
    this.moved = false;
    const on = (name, listener, options) => element.addEventListener(name, listener, options);
    on("wheel", (event) => this.wheel(event), { passive: false });
    on("pointerdown", (event) => this.press(event));
    on("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) on(name, (event) => this.release(event));
    on("pointerleave", () => does.point(null));
    on("click", (event) => this.moved || does.choose(this.pointOf(event)));
    on("dblclick", (event) => does.zoomTo(event.shiftKey ? 0.5 : 2, this.pointOf(event)));
  }

  pointOf({ clientX, clientY }) {
    const box = this.element.getBoundingClientRect();
    return [clientX - box.left, clientY - box.top];
  }

  /** With Ctrl, which pinching a touch pad sets too, or when the map has the focus; else the page scrolls. */
  wheel(event) {
    const focused = this.element.getRootNode().activeElement === this.element;
    if (!event.ctrlKey && !event.metaKey && !focused) return;
    const pixels = event.deltaY * (event.deltaMode === 1 ? 33 : event.deltaMode === 2 ? NOTCH : 1);
    const fine = event.ctrlKey && Math.abs(pixels) < 40 ? 6 : 1; // a pinch on a touch pad turns little
    if (!event.ctrlKey && !this.does.free(-pixels)) return;
    event.preventDefault();
    if (this.turned * pixels < 0) this.turned = 0;
    this.turned += pixels * fine;
    const steps = Math.trunc(this.turned / NOTCH);
    if (steps === 0) return;
    this.turned -= steps * NOTCH;
    this.does.zoom(-steps, this.pointOf(event));
  }

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

  /** How far two fingers are apart. */
  spread() {
    const [[x, y], [x2, y2]] = this.pointers.values();
    return Math.max(10, Math.hypot(x - x2, y - y2));
  }

  middle() {
    const all = Array.from(this.pointers.values());
    return [0, 1].map((side) => all.reduce((sum, each) => sum + each[side], 0) / all.length);
  }

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

  release(event) {
    this.pointers.delete(event.pointerId);
  }
}
