// ---- The computations that a worker does, or the page where there is no worker.

import { tileOf } from "./tiles.js";

/** @import { Answer, Asked, Weighed } from "./types.d.ts" */

/**
 * The promise of the answer to a question about a head: a tile.
 *
 * @param {Weighed} head
 * @param {Asked} asked
 * @param {() => boolean | Promise<boolean>} pause
 * @returns {Promise<Answer>}
 */
export const answerTo = (head, { request }, pause) => tileOf(head, request, pause);
