// ---- What is computed beside the page, or on it where there is no worker.

import { placeInRow, tileOf } from "./tiles.js";

/** @import { Answer, Asked, Weighed } from "./types.d.ts" */

/**
 * The promise of what is asked of a head: a tile, or where a pair stands in its row.
 *
 * @param {Weighed} head
 * @param {Asked} asked
 * @param {() => boolean | Promise<boolean>} pause
 * @returns {Promise<Answer>}
 */
export async function answerTo(head, { job, request }, pause) {
  return job === "place" ? placeInRow(head, request.i, request.j) : tileOf(head, request, pause);
}
