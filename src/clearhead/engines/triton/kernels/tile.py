"""The epilogue that all scores share: scale, softcap, bias, mask; dropout; and loads of a call's numbers.

A tile is (queries, keys) or (keys, queries): the first axis is the side whose sums a program computes, since a sum
along the second axis is one over numbers of few threads. Here `i` and `j` are the indices of a tile's queries and keys,
which broadcast to it: (Q, 1) and (1, K), or (1, Q) and (K, 1).
"""

import triton
import triton.language as tl

from clearhead.engines.triton.kernels.numbers import tanh


@triton.jit
def of(view, b, h):
    """Return the address of a sequence and head in a (B, H, …) tensor."""
    return view.at + b.to(tl.int64) * view.b + h.to(tl.int64) * view.h


@triton.jit
def along(view, b, h, places, inside, other, column=0):
    """Load numbers of a (B, H, L) tensor, or of one column of a (B, H, L, n) one, at these places; `other` outside."""
    return tl.load(of(view, b, h) + places.to(tl.int64) * view.l + column * view.d, mask=inside, other=other)


@triton.jit
def matrix(view, b, h, rows, columns, inside):
    """Load numbers of a (B, H, L, D) tensor at rows and columns that broadcast to the result, 0 outside."""
    return tl.load(of(view, b, h) + rows.to(tl.int64) * view.l + columns.to(tl.int64) * view.d, mask=inside, other=0.0)


@triton.jit
def block_of(program, length, heads, SIZE: tl.constexpr):
    """Return a program's block of one side, its places, its sequence, its head, and its head among all sequences."""
    blocks = tl.cdiv(length, SIZE)
    block, head = program % blocks, program // blocks
    return block, block * SIZE + tl.arange(0, SIZE), head // heads, head % heads, head


@triton.jit
def sound(side, b, h, places):
    """Return which of these places have a row of finite numbers only. Other rows are read as zeros.

    If no row is odd, which is tested first, no poison is read.
    """
    inside = places < side.length
    if side.poison is not None:
        inside = inside & (poison(side, b, h, places) == 0.0)
    return inside


@triton.jit
def poison(side, b, h, places):
    """Load NaN for the rows that are not finite, 0 for others."""
    inside = places < side.length
    if side.odd is not None:
        inside = inside & (tl.load(side.odd).to(tl.int32, bitcast=True) > 0)
    return along(side.poison, b, h, places, inside, 0.0)


@triton.jit
def values(given, b, key_head, j, columns):
    """Load the values of keys j at these columns; the two broadcast to the result."""
    inside = sound(given.key, b, key_head, j) & (columns < given.columns)
    return matrix(given.value, b, key_head, j, columns, inside)


@triton.jit
def seen(given, b, h, i, j):
    """Return which pairs are allowed."""
    keep = (i < given.query.length) & (j < given.key.length)
    if given.spans is not None:
        real = i < given.query.length
        start = along(given.spans.start, b, h, i, real, 0).to(tl.int32)
        stop = along(given.spans.stop, b, h, i, real, 0).to(tl.int32)
        keep = keep & (j >= start) & (j < stop)
        if given.spans.gap_start is not None:
            for gap in tl.static_range(given.spans.GAPS):
                low = along(given.spans.gap_start, b, h, i, real, 0, gap).to(tl.int32)
                high = along(given.spans.gap_stop, b, h, i, real, 0, gap).to(tl.int32)
                keep = keep & ((j < low) | (j >= high))
    return keep


@triton.jit
def tiles(given, b, h, block, part):
    """Return the first key block of a block of queries in the part-th of its ranges, and one more than the last."""
    if given.ranges is None:
        return 0, tl.cdiv(given.key.length, given.shape.KEYS)
    else:
        at = of(given.ranges.of_queries, b, h) + (block * given.shape.RANGES + part) * 2
        return tl.load(at), tl.load(at + 1)


@triton.jit
def touches(given, b, h, block, key_block):
    """Return whether a block of queries has allowed pairs in a block of keys."""
    found = False
    for part in tl.static_range(given.shape.RANGES):
        first, last = tiles(given, b, h, block, part)
        found = found | ((first <= key_block) & (key_block < last))
    return found


@triton.jit
def finish(raw, given, b, h, key_head, i, j):
    """Compute the finished scores from Σ_d w_d φ, −∞ at masked pairs, and the scores before bias and mask."""
    capped = raw * given.scale
    if given.softcap is not None:
        capped = given.softcap * tanh(capped / given.softcap, given.shape.BACKEND)
    s = capped
    inside = (i < given.query.length) & (j < given.key.length)
    if given.dense is not None:
        s += matrix(given.dense, b, h, i, j, inside).to(tl.float32)
    if given.relative is not None:
        s += along(given.relative, b, h, j - i + (given.query.length - 1), inside, 0.0).to(tl.float32)
    s += poison(given.query, b, h, i)  # NaN where an operand is not finite
    if given.key.poison is not None:
        s += poison(given.key, b, key_head, j)
    return tl.where(seen(given, b, h, i, j), s, float("-inf")), capped


@triton.jit
def mix(x):
    """Compute Wellons' lowbias32, bit for bit the hash of base/dropout.py, in 32-bit words that wrap around."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept(given, b, h, i, j):
    """Return which pairs of a tile dropout keeps; i and j are the indices of its queries and keys."""
    seed = tl.load(given.dropout.seed)
    sequence = mix(mix(mix(seed.to(tl.uint32)) + (seed >> 32).to(tl.uint32)) + (b + given.dropout.batch).to(tl.uint32))
    row = mix(mix(sequence + (h + given.dropout.head).to(tl.uint32)) + (i + given.dropout.query).to(tl.uint32))
    x = row + mix((j + given.dropout.key).to(tl.uint32) + 0x9E3779B9)
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x.to(tl.int32, bitcast=True) >= given.dropout.limit
