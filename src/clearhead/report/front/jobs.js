// ---- The computations that a worker does, or the page where there is no worker.

import { placeInRow, tileOf } from "./tiles.js";

/** @import { Answer, Asked, Weighed } from "./types.d.ts" */

/**
 * The promise of the answer to a question about a head: a tile, or the rank of a pair in its row.
 *
 * @param {Weighed} head
 * @param {Asked} asked
 * @param {() => boolean | Promise<boolean>} pause
 * @returns {Promise<Answer>}
 */
export async function answerTo(head, { job, request }, pause) {
  return job === "place" ? placeInRow(head, request.i, request.j) : tileOf(head, request, pause);
}
