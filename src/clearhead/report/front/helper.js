// ---- Work beside the page, in a worker: its program stands in that of the page, as `WORKER_PROGRAM`.

import { answerTo } from "./jobs.js";
import { slices } from "./tiles.js";
import { breathe } from "./weights.js";

/** @import { Answer, Asked, FromWorker, Numbers, Tiles, ToWorker, Weighed } from "./types.d.ts" */

const KEPT = 3; // heads in the worker

/**
 * The parts of a head that the worker needs, as a copy that can be transferred, and the buffers of the copy.
 *
 * @param {Weighed} head
 * @returns {{ copy: Weighed, moved: ArrayBufferLike[] }}
 */
function copyOf(head) {
  /** @type {ArrayBufferLike[]} */
  const moved = [];
  /** @param {Numbers} numbers */
  const own = (numbers) => {
    const copy = numbers.slice();
    moved.push(copy.buffer);
    return copy;
  };
  /** @param {Tiles | null} tiles */
  const ownTiles = (tiles) => tiles && { ...tiles, places: own(tiles.places), values: own(tiles.values) };
  const { queries, keys, features, phi, scale, softcap, sink, weight, scores, relative, dense, times, slope, shares } = head;
  const copy = {
    queries, keys, features, phi, scale, softcap, sink,
    query: own(head.query), key: own(head.key), weight: weight && own(weight), scores: scores && own(scores),
    relative: relative && own(relative), dense: dense && { ...dense, values: own(dense.values) },
    tiles: ownTiles(head.tiles), holes: ownTiles(head.holes),
    start: own(head.start), stop: own(head.stop), counts: own(head.counts), logsumexp: own(head.logsumexp),
    times: times && own(times), shares: shares && own(shares),
    slope: slope && { ...slope, grad: own(slope.grad), value: own(slope.value) },
  };
  return { copy, moved };
}

/** Asks the worker; where there is none, the page does the work itself, a slice at a time. */
export class Helper {
  constructor() {
    /** @type {Map<number, { head: Weighed, asked: Asked, resolve: (found: Answer) => void }>} */
    this.waiting = new Map(); // by id: the question, and the functions that answer it
    /** @type {number[]} */
    this.kept = []; // heads in the worker, last used last
    /** @type {WeakMap<Weighed, number>} */
    this.numbers = new WeakMap();
    this.asked = 0;
    /** @type {Worker | null} */
    this.worker = null;
    if (typeof Worker === "undefined") return;
    try {
      const address = URL.createObjectURL(new Blob([WORKER_PROGRAM], { type: "text/javascript" }));
      this.worker = new Worker(address);
      this.worker.onmessage = (/** @type {MessageEvent<FromWorker>} */ { data }) => this.answer(data.id, data.found);
      this.worker.onerror = (event) => {
        event.preventDefault();
        this.alone();
      };
    } catch {
      this.worker = null; // workers are not allowed here
    }
  }

  /**
   * The promise of an answer; null when the question was taken back by `helper.stop(id)`.
   *
   * @param {Weighed} head
   * @param {Asked} asked
   */
  ask(head, asked) {
    const id = ++this.asked;
    /** @type {Promise<Answer>} */
    const answer = new Promise((resolve) => { this.waiting.set(id, { head, asked, resolve }); });
    if (this.worker) this.send(this.worker, id);
    else this.work(id);
    return { id, answer };
  }

  /** @param {number} id */
  stop(id) {
    if (!this.waiting.has(id)) return;
    if (this.worker) tell(this.worker, { id, job: "stop" });
    else this.answer(id, null);
  }

  /**
   * @param {number} id
   * @param {Answer} found
   */
  answer(id, found) {
    this.waiting.get(id)?.resolve(found);
    this.waiting.delete(id);
  }

  /**
   * @param {Worker} worker
   * @param {number} id
   */
  send(worker, id) {
    const waiting = this.waiting.get(id);
    if (!waiting) return;
    const { head, asked } = waiting;
    const number = this.numbers.get(head) ?? id;
    this.numbers.set(head, number);
    try {
      if (!this.kept.includes(number)) {
        const { copy, moved } = copyOf(head);
        tell(worker, { job: "keep", number, head: copy }, moved);
      }
      this.kept = [...this.kept.filter((each) => each !== number), number];
      for (const first of this.kept.splice(0, this.kept.length - KEPT)) tell(worker, { job: "forget", number: first });
      tell(worker, { job: "answer", id, number, asked });
    } catch {
      this.alone(); // the head cannot be copied
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

  /** @param {number} id */
  async work(id) {
    const waiting = this.waiting.get(id);
    if (!waiting) return;
    await breathe();
    this.answer(id, await answerTo(waiting.head, waiting.asked, slices(12, () => this.waiting.has(id))));
  }
}

/**
 * @param {Worker} worker
 * @param {ToWorker} message
 * @param {ArrayBufferLike[]} [moved]
 */
const tell = (worker, message, moved = []) => worker.postMessage(message, moved.filter((one) => one instanceof ArrayBuffer));
