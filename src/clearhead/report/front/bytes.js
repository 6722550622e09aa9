// ---- Tokens of bytes as the text that they stand for.

export const special = /^(\[[A-Z]+\d*\]|<\/?[a-z_]+\d*>|<\|[^|]*\|>)$/; // a special token: [CLS], </s>, <|end|>

/** Byte-level tokenizers write each byte as one sign: printable Latin-1 as itself, other bytes from U+0100 on. */
const byteSigns = new Map();
for (let byte = 0, next = 256; byte < 256; byte++) {
  const printable = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  byteSigns.set(String.fromCharCode(printable ? byte : next++), byte);
}

/**
 * The bytes of a token, or null where the token is not made of bytes: a special token, or a plain word.
 *
 * @param {string} token
 * @param {string} marking
 * @returns {number[] | null}
 */
function bytesOfToken(token, marking) {
  if (marking === "▁") return /^<0x[0-9A-F]{2}>$/.test(token) ? [parseInt(token.slice(3, 5), 16)] : null;
  const bytes = Array.from(token, (sign) => byteSigns.get(sign) ?? -1);
  return bytes.includes(-1) ? null : bytes;
}

/**
 * The number of bytes of the UTF-8 sign that begins with this byte; 0 where none begins with it.
 *
 * @param {number} byte
 */
const lengthFrom = (byte) =>
  (byte < 0x80 ? 1 : byte < 0xc2 ? 0 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : byte < 0xf5 ? 4 : 0);

/**
 * The sign that begins at a place of some bytes, as [text, number of bytes]; ["", 1] where no sign begins there.
 *
 * @param {number[]} bytes
 * @param {number} at
 * @returns {[string, number]}
 */
function signAt(bytes, at) {
  const part = Uint8Array.from(bytes.slice(at, at + lengthFrom(bytes[at])));
  try {
    return part.length ? [new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(part), part.length] : ["", 1];
  } catch {
    return ["", 1];
  }
}

/** @param {number} byte */
const byteName = (byte) => `⟨${byte.toString(16).toUpperCase().padStart(2, "0")}⟩`;
export const onlyByteNames = /^(⟨[0-9A-F]{2}⟩)+$/;

/**
 * Each token's text. A sign whose bytes are in several tokens stands with the first of them; a token that only goes on
 * with one is the names of its bytes, and so is a byte that is in no sign.
 *
 * @param {string[]} tokens
 * @param {string} marking
 */
export function textsOfBytes(tokens, marking) {
  const each = tokens.map((token) => bytesOfToken(token, marking));
  const texts = tokens.map((token, index) => (each[index] ? "" : token));
  for (let from = 0; from < tokens.length; from++) {
    if (!each[from]) continue;
    /** @type {number[]} */
    const bytes = [];
    /** @type {number[]} */
    const owners = [];
    for (; from < tokens.length; from++) {
      const own = each[from];
      if (!own) break;
      bytes.push(...own);
      owners.push(...own.map(() => from));
    }
    for (let at = 0, size = 1; at < bytes.length; at += size) {
      let sign = String.fromCharCode(bytes[at]);
      size = 1;
      if (bytes[at] > 127) [sign, size] = signAt(bytes, at);
      texts[owners[at]] += sign || byteName(bytes[at]);
    }
  }
  return texts.map((text, index) => (text === "" ? (each[index] ?? []).map(byteName).join("") : text));
}

/**
 * Are these tokens of bytes, though none begins with a space? If so all are, and their bytes are UTF-8 beyond ASCII.
 *
 * @param {string[]} tokens
 */
export function onlyBytes(tokens) {
  if (!tokens.some((token) => /[^ -~]/.test(token))) return false;
  const each = tokens.filter((token) => !special.test(token)).map((token) => bytesOfToken(token, "Ġ"));
  const bytes = each.flatMap((own) => own ?? [-1]);
  if (bytes.includes(-1)) return false;
  let beyond = false;
  for (let at = 0; at < bytes.length; at++) {
    if (bytes[at] < 128) continue;
    const [sign, size] = signAt(bytes, at);
    if (sign === "" && at + lengthFrom(bytes[at]) <= bytes.length) return false;
    beyond ||= sign !== "";
    at += size - 1;
  }
  return beyond;
}
