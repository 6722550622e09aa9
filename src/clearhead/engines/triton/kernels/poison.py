"""Detection of queries and keys that are not finite: the other kernels read them as zeros, and add NaN.

A key is not finite if its value is not, for the reason in `problem.guard`. One pass over the operands finds all; it
writes nothing if all are finite.
"""

import triton
import triton.language as tl

from clearhead.engines.triton.kernels.tile import along, block_of, matrix


@triton.jit
def _not_finite(view, b, h, rows, length, width, WIDTH: tl.constexpr):
    """Return 1 for each of these rows that holds a number that is not finite, else 0."""
    found = tl.zeros_like(rows)
    for first in range(0, width, WIDTH):
        dims = first + tl.arange(0, WIDTH)
        inside = (rows[:, None] < length) & (dims[None, :] < width)
        x = matrix(view, b, h, rows[:, None], dims[None, :], inside).to(tl.float32)
        found = found | tl.max((x - x != 0.0).to(tl.int32), 1)
    return found


@triton.jit
def _blind(spans, b, h, i, queries):
    """Return 1 for each fully masked query: its hull is empty, or its gaps cover the hull."""
    inside = i < queries
    left = along(spans.start, b, h, i, inside, 0).to(tl.int32)
    stop = along(spans.stop, b, h, i, inside, 0).to(tl.int32)
    some = tl.zeros_like(i)
    if spans.gap_start is not None:
        for gap in tl.static_range(spans.GAPS):
            low = along(spans.gap_start, b, h, i, inside, 0, gap).to(tl.int32)
            some = some | (tl.minimum(low, stop) > left).to(tl.int32)
            left = tl.maximum(left, along(spans.gap_stop, b, h, i, inside, 0, gap).to(tl.int32))
    return 1 - (some | (stop > left).to(tl.int32))


@triton.jit
def poison_kernel(query, key, value, spans, width, columns, of_queries, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write NaN for each query and key that is not finite, and their number; both were 0 before.

    The first `of_queries` programs have a block of queries each, the others a block of keys. With `spans`, fully masked
    queries count as not finite too: (q − k)² may overflow for them.
    """
    program = tl.program_id(0)
    if program < of_queries:
        _queries(program, query, spans, width, WIDTH, BLOCK)
    elif key.poison is not None:  # without a mask a NaN key reaches every query anyway
        _keys(program - of_queries, key, value, width, columns, WIDTH, BLOCK)


@triton.jit
def _queries(program, query, spans, width, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    _, rows, b, h, head = block_of(program, query.length, query.heads, BLOCK)
    bad = _not_finite(query.view, b, h, rows, query.length, width, WIDTH)
    if spans is not None:
        bad = bad | _blind(spans, b, h, rows, query.length)
    _store(query, head, rows, bad)


@triton.jit
def _keys(program, key, value, width, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    _, rows, b, h, head = block_of(program, key.length, key.heads, BLOCK)
    bad = _not_finite(key.view, b, h, rows, key.length, width, WIDTH)
    if value is not None:
        bad = bad | _not_finite(value, b, h, rows, key.length, columns, WIDTH)
    _store(key, head, rows, bad)


@triton.jit
def _store(side, head, rows, bad):
    bad = bad & (rows < side.length).to(tl.int32)
    count = tl.sum(bad, 0)
    if count > 0:
        nan = tl.full(bad.shape, float("nan"), tl.float32)
        tl.store(side.poison.at + head.to(tl.int64) * side.length + rows, nan, mask=bad > 0)
        tl.atomic_add(side.odd, count.to(tl.float32))
