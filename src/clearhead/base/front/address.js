// ---- The address of a page: the choice stands behind its "#", so that a link and Back restore it.

/**
 * The parts of an address, such as those of `#layer=2&head=9`.
 *
 * @param {string} address
 */
export const partsOf = (address) => new URLSearchParams(address.replace(/^#/, ""));

/**
 * The address of these parts, in this order.
 *
 * @param {[string, string | number | null][]} parts those that are null are left out
 */
export function addressFrom(parts) {
  const held = new URLSearchParams();
  for (const [name, value] of parts) if (value !== null) held.set(name, String(value));
  return `#${held}`;
}

/**
 * A number of an address, or null where it is none below `count`.
 *
 * @param {string | null | undefined} text
 * @param {number} count
 */
export function numberIn(text, count) {
  const value = /^\d+$/.test(text ?? "") ? Number(text) : NaN;
  return value < count ? value : null;
}

/**
 * Makes this the part behind the "#" in the page's address.
 *
 * @param {string} address
 * @param {boolean} step whether Back returns to the address before
 */
export function writeAddress(address, step) {
  if (address === window.location.hash) return;
  try {
    window.history[step ? "pushState" : "replaceState"](null, "", address);
  } catch {
    // A page inside another document may not change its address: it works without.
  }
}

/**
 * Calls `go` with the address where a link or Back has changed it.
 *
 * @param {(address: string) => unknown} go
 */
export function followAddress(go) {
  for (const event of ["popstate", "hashchange"]) window.addEventListener(event, () => go(window.location.hash));
}
