// ---- Numbers as every view of an explanation prints them, and where they stand in an array.

/**
 * Digits as Python rounds them: where two are as near, to the even one. `format`: "toFixed" or "toExponential".
 *
 * @param {number} size
 * @param {"toFixed" | "toExponential"} format
 * @param {number} digits
 */
function rounded(size, format, digits) {
  const [exact, exponent] = size[format](60).split("e");
  const end = exact.length - 60 + digits;
  const halfway = /^50*$/.test(exact.slice(end)) && /[02468]$/.test(exact.slice(0, end));
  if (!halfway) return size[format](digits);
  return exact.slice(0, end) + (exponent ? `e${exponent}` : "");
}

let digits = 4; // of each number that is written
let limits = [0.099995, 0.0099995, 0.00099995]; // the least sizes that are rounded up to 0.1, 0.01 and 0.001

/**
 * Numbers have so many digits from now on.
 *
 * @param {number} count
 */
export function writeDigits(count) {
  digits = count;
  limits = ["0.0", "0.00", "0.000"].map((zeros) => Number(`${zeros}${"9".repeat(count)}5`));
}

/**
 * A number as Python's `number()` has it: four digits after the point, but for whole numbers; below 0.1 and far from 1, four
 * in all. A number that is rounded up to 0.1 is shown as 0.1 is. `writeDigits` sets another number of digits than four.
 *
 * @param {number} x
 */
export function number(x) {
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "-∞";
  const size = Math.abs(x);
  const sign = x < 0 ? "-" : "";
  if (Number.isInteger(x) && size < 1e4) return String(x + 0);
  const places = size >= limits[0] ? digits : size >= limits[1] ? digits + 1 : digits + 2;
  if (size >= limits[2] && size < 1e4) return sign + rounded(size, "toFixed", places);
  return sign + rounded(size, "toExponential", digits - 1).replace(/e([+-])(\d)$/, "e$10$2");
}

/**
 * @param {number} x
 * @param {string} kind
 */
export function textOf(x, kind) {
  if (kind === "allowed") return x ? "■" : "·";
  return kind === "integer" ? String(x) : number(x);
}

/** @param {number[]} sizes */
export const sizeOf = (sizes) => sizes.reduce((product, n) => product * n, 1);

/**
 * The last entry of a list that is not empty.
 *
 * @template Entry
 * @param {ArrayLike<Entry>} list
 */
export const lastOf = (list) => list[list.length - 1];

/**
 * Where an index stands in memory, in C order.
 *
 * @param {number[]} index
 * @param {number[]} sizes
 */
export const placeOf = (index, sizes) => index.reduce((place, n, axis) => place * sizes[axis] + n, 0);

/**
 * Calls `visit(index)` for every index of an array of these sizes, in C order; the index is used again.
 *
 * @param {number[]} sizes
 * @param {(index: number[]) => void} visit
 */
export function everyIndex(sizes, visit) {
  const index = sizes.map(() => 0);
  for (let left = sizeOf(sizes); left > 0; left--) {
    visit(index);
    for (let axis = sizes.length - 1; axis >= 0 && ++index[axis] === sizes[axis]; axis--) index[axis] = 0;
  }
}

/**
 * A whole number with its thousands apart. (`toLocaleString` takes 10 ms when it is first called.)
 *
 * @param {number} count
 */
export const grouped = (count) => String(count).replace(/\B(?=(\d{3})+$)/g, ",");
