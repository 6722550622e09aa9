"""Statistics of the weights: of rows, which forward.py computes on its way, and of keys and cells, in a second pass.

The second pass reads each query's maximum and log_sum, so that a weight is e^(s − maximum − log_sum). A program sums
one block of keys, or one cell of a map, in one order: the same bits in each run.
"""

import triton
import triton.language as tl

from clearhead.engines.triton.kernels import score
from clearhead.engines.triton.kernels.numbers import LOG2E
from clearhead.engines.triton.kernels.tile import along, block_of, touches


@triton.jit
def more_spread(spread, total, m, safe, shrink, above, p):
    """Update Σ e^(s − m) (s − m) over the keys so far for the new m; with log Σ e^(s − m) it gives the entropy."""
    apart = tl.where(m == float("-inf"), 0.0, m - safe)
    return shrink * (spread + apart * total) + tl.sum(p * tl.where(above == float("-inf"), 0.0, above), 1)


@triton.jit
def apart(position, b, h, i, j, queries):
    """Compute |position_i − j| of a tile."""
    return tl.abs(along(position, b, h, i, i < queries, 0) - j).to(tl.float32)


@triton.jit
def first_of(s, peak, places, COUNT: tl.constexpr):
    """Return the first place of each row's largest number; COUNT if there is none, as in a row of NaN."""
    return tl.min(tl.where(s == peak[:, None], places[None, :], COUNT), 1)


@triton.jit
def none_yet(QUERIES: tl.constexpr, TOP: tl.constexpr):
    """Return the start of the TOP largest scores of each query, −∞, and of their keys, distinct numbers below 0."""
    keys = tl.zeros((QUERIES, TOP), tl.int32) - 1 - tl.arange(0, TOP)[None, :]
    return tl.full((QUERIES, TOP), float("-inf"), tl.float32), keys


@triton.jit
def merge(top, top_keys, s, peak, first, KEYS: tl.constexpr, TOP: tl.constexpr):
    """Merge the largest scores with those of one more block of keys; of equal scores the first keys stay."""
    keys = tl.arange(0, KEYS)
    least = tl.min(top, 1)
    while tl.max((peak > least).to(tl.int32), 0) > 0:
        better = peak > least
        best = first_of(s, peak, keys, KEYS)
        lowest = top == least[:, None]
        leaves = tl.max(tl.where(lowest, top_keys, -TOP - 1), 1)
        change = better[:, None] & lowest & (top_keys == leaves[:, None])
        top = tl.where(change, peak[:, None], top)
        top_keys = tl.where(change, (best + first)[:, None], top_keys)
        s = tl.where(better[:, None] & (keys[None, :] == best[:, None]), float("-inf"), s)
        peak, least = tl.max(s, 1), tl.min(top, 1)
    return top, top_keys


@triton.jit
def store_largest(found, at, inside, top, top_keys, maximum, log_sum, TOP: tl.constexpr):
    """Write the largest weights in order, their keys, −1 if fewer keys are allowed, and their scores."""
    for place in tl.static_range(TOP):
        best = tl.max(top, 1)
        key = tl.min(tl.where((top == best[:, None]) & (top_keys >= 0), top_keys, 2147483647), 1)
        some = best > float("-inf")
        # a score of −∞ has the weight 0, but NaN in a row of NaN
        weight = tl.where(some | (log_sum != log_sum), tl.exp2((best - maximum - log_sum) * LOG2E), 0.0)
        if place < found.number:
            tl.store(found.largest + at * found.number + place, weight, mask=inside)
            tl.store(found.indices + at * found.number + place, tl.where(some, key, -1).to(tl.int64), mask=inside)
            if found.scores is not None:
                tl.store(found.scores + at * found.number + place, best, mask=inside)
        top = tl.where(top_keys == key[:, None], float("-inf"), top)


@triton.jit
def weights(s, rows, b, h, i, queries):
    """Compute the weights of a tile from its finished scores, 0 at masked pairs."""
    inside = i < queries
    maximum = along(rows.maximum, b, h, i, inside, 0.0)
    log_sum = along(rows.log_sum, b, h, i, inside, float("inf"))
    return tl.where(s == float("-inf"), 0.0, tl.exp2(((s - maximum) - log_sum) * LOG2E))


@triton.jit
def received_kernel(given, rows, factors, received):
    """Compute Σ_i factor_i w_ij of a block of keys, (B, H, Lk)."""
    QUERIES: tl.constexpr = given.shape.QUERIES
    KEYS: tl.constexpr = given.shape.KEYS
    block, js, b, h, head = block_of(tl.program_id(0), given.key.length, given.query.heads, KEYS)
    key_head = h // given.groups
    own = score.rows(given, given.key, b, key_head, js)
    total = tl.zeros((KEYS,), tl.float32)
    for query_block in range(0, tl.cdiv(given.query.length, QUERIES)):
        if touches(given, b, h, query_block, block):
            places = query_block * QUERIES + tl.arange(0, QUERIES)
            i = places[None, :]
            s, _, _ = score.tile(given, own, b, h, key_head, query_block, block, places, js, True)
            w = weights(s, rows, b, h, i, given.query.length)
            if factors is not None:
                w = w * along(factors, b, h, i, i < given.query.length, 0.0)
            total += tl.sum(w, 1)
    tl.store(received + head.to(tl.int64) * given.key.length + js, total, mask=js < given.key.length)


@triton.jit
def cells_kernel(given, rows, factors, mean, peak, tall, wide, down, across):
    """Compute Σ factor_i w_ij, and the largest w_ij, of a cell of `tall` queries and `wide` keys.

    The map has the shape (down, across).
    """
    QUERIES: tl.constexpr = given.shape.QUERIES
    KEYS: tl.constexpr = given.shape.KEYS
    program = tl.program_id(0)
    column, row, head = program % across, (program // across) % down, program // (across * down)
    b, h = head // given.query.heads, head % given.query.heads
    key_head = h // given.groups
    top, left = row * tall, column * wide
    bottom, right = tl.minimum(top + tall, given.query.length), tl.minimum(left + wide, given.key.length)
    total = tl.zeros((QUERIES,), tl.float32)
    most = tl.zeros((QUERIES,), tl.float32)
    for query_block in range(top // QUERIES, tl.cdiv(bottom, QUERIES)):
        places = query_block * QUERIES + tl.arange(0, QUERIES)
        i = places[:, None]
        own = score.rows(given, given.query, b, h, places)
        for key_block in range(left // KEYS, tl.cdiv(right, KEYS)):
            if touches(given, b, h, query_block, key_block):
                js = key_block * KEYS + tl.arange(0, KEYS)
                j = js[None, :]
                s, _, _ = score.tile(given, own, b, h, key_head, query_block, key_block, places, js, False)
                w = weights(s, rows, b, h, i, given.query.length)
                w = tl.where((i >= top) & (i < bottom) & (j >= left) & (j < right), w, 0.0)
                if peak is not None:
                    largest = tl.max(tl.where(w == w, w, float("inf")), 1)  # tl.max ignores NaN
                    most = tl.maximum(most, largest)
                if mean is not None:
                    if factors is not None:
                        w = w * along(factors, b, h, i, i < given.query.length, 0.0)
                    total += tl.sum(w, 1)
    if mean is not None:
        tl.store(mean + program, tl.sum(total, 0))
    if peak is not None:
        largest = tl.max(most, 0)
        tl.store(peak + program, tl.where(largest == float("inf"), float("nan"), largest))
