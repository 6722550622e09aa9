// ---- What is computed beside the page, or on it where there is no worker.

import { placeInRow, tileOf } from "./tiles.js";

export const JOBS = {
  tile: tileOf,
  place: async (head, { i, j }) => placeInRow(head, i, j),
};
