// ---- The program of the worker. It gets each head once.

import { JOBS } from "./jobs.js";
import { slices } from "./tiles.js";

/** What the worker does: keeps heads, and answers each question unless it is taken back before. */
function serve() {
  const heads = new Map();
  const stopped = new Set();
  self.onmessage = async ({ data: { id, job, number, head, request } }) => {
    if (job === "keep") heads.set(number, head);
    else if (job === "forget") heads.delete(number);
    else if (job === "stop") stopped.add(id);
    else {
      try {
        const found = await JOBS[job](heads.get(number), request, slices(25, () => !stopped.has(id)));
        stopped.delete(id);
        self.postMessage({ id, found }, found ? [found.buffer] : []);
      } catch (error) {
        setTimeout(() => { throw error; }); // to where the page hears of it
      }
    }
  };
}

serve();
