// ---- The language of a step's code: one assignment in PyTorch, read into a tree.
//
// A tree is {kind: "name" | "value" | "call"}: a call has its `name`, its `inputs` (trees) and `options` by name. Every
// operator and method is a call: `a @ b` is matmul(a, b), `a.sum(-1)` is sum(a, -1), `torch.exp(a)` is exp(a),
// `[a, b]` and `(a, b)` are list(a, b), `a[..., 0:2]` is index(a, "...", {from: 0, to: 2}). A type such as
// `torch.float32` is a value: its name.

/** @import { CallTree, Tree, ValueTree } from "./types.d.ts" */

/** @type {Record<string, [number, string]>} how tightly each binds, in Python's order, and its name */
const OPERATORS = {
  "<=": [1, "le"], "<": [1, "lt"], ">=": [1, "ge"], ">": [1, "gt"], "==": [1, "eq"], "!=": [1, "ne"],
  "|": [2, "or"], "&": [3, "and"], "+": [4, "add"], "-": [4, "sub"],
  "*": [5, "mul"], "/": [5, "div"], "@": [5, "matmul"], "**": [7, "pow"],
};

/** @type {Record<string, string>} */
const UNARY = { "-": "neg", "~": "not" };
const UNARY_BINDS = 6;

/** @type {Record<string, number>} */
const CONSTANTS = { inf: Infinity, nan: NaN, True: 1, False: 0 };
const TOKEN = /\s*(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?|[A-Za-z_]\w*|\*\*|<=|>=|==|!=|\.\.\.|[-+*/@&|~<>()[\],.:=])/gy;

/** @param {string} text */
function tokensOf(text) {
  const tokens = [];
  TOKEN.lastIndex = 0;
  while (TOKEN.lastIndex < text.trimEnd().length) {
    const at = TOKEN.lastIndex;
    const found = TOKEN.exec(text);
    if (!found) throw new SyntaxError(`nothing is known of “${text.slice(at).trim()}”`);
    tokens.push(found[1]);
  }
  return tokens;
}

/**
 * `name = expression` as {name, tree}. Throws a SyntaxError for what is no such line.
 *
 * @param {string} code
 */
export function read(code) {
  const tokens = tokensOf(code);
  let at = 0;
  const next = () => tokens[at];
  /**
   * @param {string} [wanted]
   * @returns {string}
   */
  const take = (wanted) => {
    if (wanted !== undefined && tokens[at] !== wanted) {
      throw new SyntaxError(`“${wanted}” is missing before “${tokens[at] ?? "the end"}” in “${code}”`);
    }
    return tokens[at++];
  };
  /**
   * @param {string} name
   * @param {Tree[]} inputs
   * @param {Record<string, Tree>} [options]
   * @returns {CallTree}
   */
  const call = (name, inputs, options = {}) => ({ kind: "call", name, inputs, options });

  /**
   * @param {number} least
   * @returns {Tree}
   */
  function expression(least) {
    let left = unary();
    for (;;) {
      const [binds, name] = OPERATORS[next()] ?? [0, ""];
      if (!binds || binds < least) return left;
      take();
      left = call(name, [left, expression(name === "pow" ? UNARY_BINDS : binds + 1)]); // a power binds from the right
    }
  }

  /** @returns {Tree} */
  function unary() {
    if (!UNARY[next()]) return postfix(primary());
    return call(UNARY[take()], [expression(UNARY_BINDS)]);
  }

  /** @returns {Tree} */
  function primary() {
    const token = take();
    if (token === "(") {
      const [first, ...more] = listUpTo(")");
      return more.length ? call("list", [first, ...more]) : first;
    }
    if (token === "[") return call("list", listUpTo("]"));
    if (/^[\d.]/.test(token)) return { kind: "value", value: Number(token), text: /^\d+$/.test(token) ? token : null };
    if (token in CONSTANTS) return { kind: "value", value: CONSTANTS[token], text: null };
    if (!/^[A-Za-z_]/.test(token ?? "")) throw new SyntaxError(`“${token ?? "the end"}” is no value in “${code}”`);
    if (token !== "torch") return { kind: "name", name: token };
    let name = "";
    while (next() === ".") {
      take();
      name = take();
    }
    return next() === "(" ? call(name, ...arguments_()) : { kind: "value", value: name, text: name };
  }

  /**
   * @template Part
   * @param {string} end
   * @param {() => Part} part
   */
  function partsUpTo(end, part) {
    const found = [];
    while (next() !== end) {
      found.push(part());
      if (next() !== end) take(",");
    }
    take(end);
    return found;
  }

  /** @param {string} end */
  const listUpTo = (end) => partsUpTo(end, () => expression(1));

  /**
   * @param {Tree} tree
   * @returns {Tree}
   */
  function postfix(tree) {
    while (next() === "." || next() === "[") {
      if (take() === "[") {
        tree = call("index", [tree, ...partsUpTo("]", place)]);
        continue;
      }
      const name = take();
      tree = next() === "(" ? withInput(tree, name) : call(name, [tree]);
    }
    return tree;
  }

  /**
   * One entry of an index: a number, a list of them, `from:to:by` with any of them left out, or `...`.
   *
   * @returns {ValueTree}
   */
  function place() {
    const whole = () => (/^\d+$/.test(next()) ? Number(take()) : undefined);
    if (next() === "[" && take()) return { kind: "value", value: partsUpTo("]", whole), text: null };
    if (next() === "...") return { kind: "value", value: take(), text: null };
    const from = whole();
    if (next() !== ":") return { kind: "value", value: from, text: null };
    take();
    const to = whole();
    const by = next() === ":" && take() ? whole() : undefined;
    return { kind: "value", value: { from, to, by }, text: null };
  }

  /**
   * @param {Tree} tree
   * @param {string} name
   */
  function withInput(tree, name) {
    const [inputs, options] = arguments_();
    return call(name, [tree, ...inputs], options);
  }

  /** @returns {[Tree[], Record<string, Tree>]} */
  function arguments_() {
    const inputs = [];
    /** @type {Record<string, Tree>} */
    const options = {};
    take("(");
    while (next() !== ")") {
      if (tokens[at + 1] === "=") {
        const name = take();
        take();
        options[name] = expression(1);
      } else {
        inputs.push(expression(1));
      }
      if (next() !== ")") take(",");
    }
    take(")");
    return [inputs, options];
  }

  const name = take();
  take("=");
  const tree = expression(1);
  if (at < tokens.length) throw new SyntaxError(`“${tokens.slice(at).join(" ")}” is left over in “${code}”`);
  return { name, tree };
}

/**
 * A tree and all trees inside it.
 *
 * @param {Tree} tree
 * @returns {Generator<Tree>}
 */
function* allTrees(tree) {
  yield tree;
  if (tree.kind !== "call") return;
  for (const inner of [...tree.inputs, ...Object.values(tree.options)]) yield* allTrees(inner);
}

/**
 * What a tree reads and what it calls: the names of such trees, each once, in order.
 *
 * @param {"name" | "call"} kind
 */
const namesOf = (kind) => (/** @type {Tree} */ tree) =>
  [...new Set([...allTrees(tree)].flatMap((inner) => (inner.kind === kind ? [inner.name] : [])))];
export const namesIn = namesOf("name");
export const callsIn = namesOf("call");

/**
 * The tree with `change(tree)` in the place of each inner tree for which that is not null.
 *
 * @param {Tree} tree
 * @param {(tree: Tree) => Tree | null} change
 * @returns {Tree}
 */
export function changed(tree, change) {
  const other = change(tree);
  if (other) return other;
  return tree.kind === "call" ? { ...tree, inputs: tree.inputs.map((inner) => changed(inner, change)) } : tree;
}
