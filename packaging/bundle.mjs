// Bundles the programs and the styles of the pages with esbuild, minified, one file each:
// node packaging/bundle.mjs FOLDER, which are those of this repository, or node packaging/bundle.mjs FOLDER SOURCES

import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const SOURCES = process.argv[3] ?? join(dirname(fileURLToPath(import.meta.url)), "..", "src", "clearhead");
const REPORT = join(SOURCES, "report", "front");
const folder = process.argv[2];

const plain = { bundle: true, minify: true, charset: "utf8", legalComments: "none", logLevel: "warning", outdir: folder };
const options = { ...plain, target: "es2022", format: "iife" };

// These two speak where a browser is too old for the others, so they are of the JavaScript of 2017.
const first = { guard: join(SOURCES, "base", "front", "guard.js"), load: join(REPORT, "load.js") };
await build({ ...options, target: "es2017", entryPoints: first });

const others = {
  survey: join(REPORT, "survey.js"),
  explanation: join(SOURCES, "explanation", "front", "main.js"),
  motion: join(SOURCES, "explanation", "front", "motion.js"),
};
await build({ ...options, entryPoints: others });

// A page that was opened from disk can start a worker from a text of its own alone: the worker's program stands in that of
// the report as a string.
const worker = await build({ ...options, entryPoints: [join(REPORT, "worker.js")], write: false });
const define = { WORKER_PROGRAM: JSON.stringify(worker.outputFiles[0].text) };
await build({ ...options, define, entryPoints: { report: join(REPORT, "main.js") } });
await build({ ...options, define, entryPoints: { widget: join(REPORT, "widget.js") }, format: "esm" });

// The style of each page: a file for each pane, after the rules that all pages share. `outside` is around the element
// of a report.
const styles = {
  report: [REPORT, "page", "heads", "text", "map", "compare", "colours", "lines", "pair", "simple", "tools"],
  survey: [REPORT, "page", "heads", "examples", "survey"],
  outside: [REPORT, "outside"],
  explanation: [join(SOURCES, "explanation", "front"), "plain", "page"],
  motion: [join(SOURCES, "explanation", "front"), "plain", "motion"],
};
for (const [name, [resolveDir, ...files]] of Object.entries(styles)) {
  const shared = name === "outside" ? [] : [join(SOURCES, "base", "front", "shared")];
  const contents = [...shared, ...files.map((file) => `./${file}`)].map((file) => `@import "${file}.css";`).join("\n");
  const stdin = { contents, resolveDir, loader: "css" };
  await build({ ...plain, outdir: undefined, outfile: join(folder, `${name}.css`), stdin });
}
