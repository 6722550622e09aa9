// ---- Work beside the page, in a worker: its program stands in that of the page, as `WORKER_PROGRAM`.

import { JOBS } from "./jobs.js";
import { slices } from "./tiles.js";
import { breathe } from "./weights.js";

const KEPT = 3; // heads in the worker
const NEEDED = ["queries", "keys", "features", "phi", "weight", "scores", "query", "key", "scale", "softcap", "relative",
  "dense", "tiles", "holes", "start", "stop", "counts", "logsumexp", "sink"]; // of a head, for its weights

/** A copy that can be given away: `moved` gets its buffers. */
function copied(value, moved) {
  if (ArrayBuffer.isView(value)) {
    const copy = value.slice();
    moved.push(copy.buffer);
    return copy;
  }
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, copied(each, moved)]));
}

/** Asks the worker; where there is none, the page does the work itself, a slice at a time. */
export class Helper {
  constructor() {
    this.waiting = new Map(); // id: what was asked, and how to answer it
    this.kept = []; // heads in the worker, last used last
    this.numbers = new WeakMap();
    this.asked = 0;
    this.worker = null;
    if (typeof Worker === "undefined") return;
    try {
      const address = URL.createObjectURL(new Blob([WORKER_PROGRAM], { type: "text/javascript" }));
      this.worker = new Worker(address);
      this.worker.onmessage = ({ data: { id, found } }) => this.answer(id, found);
      this.worker.onerror = (event) => {
        event.preventDefault();
        this.alone();
      };
    } catch {
      this.worker = null; // not allowed here
    }
  }

  /** The promise of an answer; null when it was taken back. `id` takes it back: `helper.stop(id)`. */
  ask(head, job, request) {
    const id = ++this.asked;
    const answer = new Promise((resolve) => { this.waiting.set(id, { head, job, request, resolve }); });
    if (this.worker) this.send(id);
    else this.work(id);
    return { id, answer };
  }

  stop(id) {
    if (!this.waiting.has(id)) return;
    if (this.worker) this.worker.postMessage({ id, job: "stop" });
    else this.answer(id, null);
  }

  answer(id, found) {
    this.waiting.get(id)?.resolve(found);
    this.waiting.delete(id);
  }

  send(id) {
    const { head, job, request } = this.waiting.get(id);
    if (!this.numbers.has(head)) this.numbers.set(head, id);
    const number = this.numbers.get(head);
    try {
      if (!this.kept.includes(number)) {
        const moved = [];
        const copy = copied(Object.fromEntries(NEEDED.map((name) => [name, head[name]])), moved);
        this.worker.postMessage({ job: "keep", number, head: copy }, moved);
      }
      this.kept = [...this.kept.filter((each) => each !== number), number];
      if (this.kept.length > KEPT) this.worker.postMessage({ job: "forget", number: this.kept.shift() });
      this.worker.postMessage({ id, job, number, request });
    } catch {
      this.alone(); // what cannot be copied
    }
  }

  close() {
    this.worker?.terminate();
    this.worker = null;
    this.waiting.clear();
  }

  /** Goes on without the worker. */
  alone() {
    this.worker?.terminate();
    this.worker = null;
    for (const id of this.waiting.keys()) this.work(id);
  }

  async work(id) {
    const { head, job, request } = this.waiting.get(id);
    await breathe();
    this.answer(id, await JOBS[job](head, request, slices(12, () => this.waiting.has(id))));
  }
}
