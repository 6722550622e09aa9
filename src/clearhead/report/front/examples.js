// ---- The strongest examples of a head by one measure: short parts of texts, with the query and the key marked.

import { make } from "../../base/front/dom.js";
import { ALONE, titleOf, valueWords } from "./measures.js";
import { run } from "./running.js";
import { readText } from "./words.js";

/** @import { ExampleOfHead } from "./types.d.ts" */

/**
 * The examples as a list; a sentence where there are none.
 *
 * @param {string} name
 * @param {ExampleOfHead[]} examples
 * @param {string[]} words
 */
export function listOf(name, examples, words) {
  if (!examples.length) return [make("p", "quiet", `No example is kept of “${titleOf(name)}”.`)];
  const list = make("ol", "examples");
  list.append(...examples.map(([value, uniform, query, key, runs]) => {
    const item = make("li");
    const beside = ALONE.has(name) || uniform === null ? "" : `; uniform attention: ${valueWords(name, uniform)}`;
    item.append(make("p", "quiet", `${valueWords(name, value)}${beside}`), textOf(runs, words, query, key));
    return item;
  }));
  const legend = make("p", "quiet example-marks");
  legend.append(make("span", "query", "the query that looks"), " ", make("span", "key", "the key looked at"));
  return [list, legend];
}

/**
 * @param {[number, ...number[]][]} runs
 * @param {string[]} words
 * @param {number | null} query
 * @param {number} key
 */
function textOf(runs, words, query, key) {
  const text = make("p", "example");
  text.dir = "auto";
  text.lang = "";
  for (const [start, ...numbers] of runs) {
    if (start > 0 || text.firstChild) text.append(text.firstChild ? " … " : "… ");
    run(text, readText(numbers.map((number) => words[number])), (span, at) => {
      const place = start + at;
      const marks = [...(place === query ? ["query"] : []), ...(place === key ? ["key"] : [])];
      span.classList.add(...marks);
      if (marks.length) span.title = `${marks.join(" and ")}, position ${place}`;
    });
  }
  return text;
}
