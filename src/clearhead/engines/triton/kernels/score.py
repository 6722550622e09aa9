"""The functions of all φ behind one interface; the constant given.shape.PHI selects the φ of a kernel."""

import triton
import triton.language as tl

from clearhead.engines.triton.kernels import mul, sq_diff, tanh_add
from clearhead.engines.triton.kernels.tile import finish
from clearhead.scores.pair_functions import number_phis

# Each φ is a case of `form`, `scores` and `add`.
MUL, TANH_ADD, SQ_DIFF = map(tl.constexpr, number_phis(("mul", "tanh_add", "sq_diff"), __name__).values())


@triton.jit
def _laid(given, x, b, h):
    """Return the address of a sequence and head in the layout by dimension."""
    return x.laid + (b * x.heads + h).to(tl.int64) * given.wide * x.padded


@triton.jit
def rows(given, x, b, h, places):
    """Load the data of the first side of its tiles that a program reads once."""
    if given.shape.PHI == MUL:
        return mul.rows(given, x, b, h, places)
    else:
        return 0.0


@triton.jit
def form(given, x, y, b, x_h, y_h, x_block, y_block):
    """Return the form in which a pair of blocks computes its sums."""
    if given.shape.PHI == TANH_ADD:
        return tanh_add.form(given, x, y, b * x.heads + x_h, b * y.heads + y_h, x_block, y_block)
    else:
        tl.static_assert((given.shape.PHI == MUL) | (given.shape.PHI == SQ_DIFF))
        return 0


@triton.jit
def scores(given, own, x, y, b, x_h, y_h, xs, ys, which, X: tl.constexpr, Y: tl.constexpr):
    """Compute Σ_d w_d φ(x_d, y_d), (X, Y)."""
    if given.shape.PHI == MUL:
        return mul.scores(given, own, y, b, y_h, ys, X, Y)
    else:
        x_at, y_at = _laid(given, x, b, x_h), _laid(given, y, b, y_h)
        if given.shape.PHI == TANH_ADD:
            return tanh_add.scores(given, x, y, b, x_h, y_h, x_at, y_at, xs, ys, which, X, Y)
        else:
            tl.static_assert(given.shape.PHI == SQ_DIFF)
            return sq_diff.scores(given, x, y, x_at, y_at, xs, ys, X, Y)


@triton.jit
def tile(given, own, b, h, key_head, block, key_block, i, j, BY_KEY: tl.constexpr):
    """Compute the finished scores of queries i and keys j, of two blocks.

    Also returns the scores before bias and mask, and the form of their sums. All are (QUERIES, KEYS), or with BY_KEY
    (KEYS, QUERIES); `own`: the `rows` of the first side.
    """
    query, key = given.query, given.key
    QUERIES: tl.constexpr = given.shape.QUERIES
    KEYS: tl.constexpr = given.shape.KEYS
    if BY_KEY:
        which = form(given, key, query, b, key_head, h, key_block, block)
        raw = scores(given, own, key, query, b, key_head, h, j, i, which, KEYS, QUERIES)
        s, capped = finish(raw, given, b, h, key_head, i[None, :], j[:, None])
    else:
        which = form(given, query, key, b, h, key_head, block, key_block)
        raw = scores(given, own, query, key, b, h, key_head, i, j, which, QUERIES, KEYS)
        s, capped = finish(raw, given, b, h, key_head, i[:, None], j[None, :])
    return s, capped, which


@triton.jit
def nothing(given, X: tl.constexpr):
    """Return the start of a side's gradient: zeros in registers for a dot product; other φ sum in memory."""
    if given.shape.PHI == MUL:
        return tl.zeros((X, given.shape.WIDTH), tl.float32)
    else:
        return 0.0


@triton.jit
def add(given, acc, x, y, b, x_h, y_h, xs, ys, which, slopes, to, to_weight):
    """Add a tile's gradients to x, each without its factor: to `acc`, or to memory at `to`; and to the weight."""
    if given.shape.PHI == MUL:
        return mul.add(given, acc, y, b, y_h, ys, slopes)
    else:
        tl.debug_barrier()  # other threads have written the sums in memory, for the previous tile
        x_at, y_at, at = _laid(given, x, b, x_h), _laid(given, y, b, y_h), (b * x.heads + x_h).to(tl.int64)
        at = at * given.wide * x.padded
        own_weight = None if to_weight is None else to_weight + at
        if given.shape.PHI == TANH_ADD:
            tanh_add.add(given, x, y, b, x_h, y_h, x_at, y_at, xs, ys, which, slopes, to + at, own_weight)
        else:
            tl.static_assert(given.shape.PHI == SQ_DIFF)
            sq_diff.add(given, x, y, x_at, y_at, xs, ys, slopes, to + at, own_weight)
        return acc


@triton.jit
def store(given, acc, x, b, h, places, to):
    """Write the sums that are in registers, (B, heads, length, D), times the scale."""
    if given.shape.PHI == MUL:
        dims = tl.arange(0, given.shape.WIDTH)
        inside = (places[:, None] < x.length) & (dims[None, :] < given.width)
        at = ((b * x.heads + h).to(tl.int64) * x.length + places[:, None]) * given.width + dims[None, :]
        tl.store(to + at, acc * given.scale, mask=inside)
