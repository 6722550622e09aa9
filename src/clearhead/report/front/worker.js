// ---- The program of the worker. It gets each head once.

import { answerTo } from "./jobs.js";
import { slices } from "./tiles.js";

/** @import { Asked, FromWorker, ToWorker, Weighed } from "./types.d.ts" */

/** @type {Map<number, Weighed>} */
const heads = new Map();

/** @type {Set<number>} */
const stopped = new Set();

/**
 * Answers a question, unless it is taken back first.
 *
 * @param {number} id
 * @param {Weighed | undefined} head
 * @param {Asked} asked
 */
async function answer(id, head, asked) {
  if (!head) throw new Error("the worker has no such head");
  const found = await answerTo(head, asked, slices(25, () => !stopped.has(id)));
  stopped.delete(id);
  /** @type {FromWorker} */
  const message = { id, found };
  self.postMessage(message, { transfer: found ? [found.buffer] : [] });
}

self.onmessage = (/** @type {MessageEvent<ToWorker>} */ { data }) => {
  if (data.job === "keep") heads.set(data.number, data.head);
  else if (data.job === "forget") heads.delete(data.number);
  else if (data.job === "stop") stopped.add(data.id);
  else answer(data.id, heads.get(data.number), data.asked).catch((error) => {
    setTimeout(() => { throw error; }); // thrown where the page can see the error
  });
};
