"""Decoding: programs compute parts of a query's keys, and a kernel joins the parts as `Partial.merge` does."""

import triton
import triton.language as tl

from clearhead.engines.triton.kernels.numbers import LOG2E


@triton.jit
def join_kernel(given, parts, found, SPLITS: tl.constexpr, SHARES: tl.constexpr):
    """Compute one query's output, maximum and log_sum from SPLITS parts of the keys, (SPLITS, B, H, Lq, …).

    A part is a term e^(maximum + log_sum) of the denominator of the whole, and the sink is one more. SHARES: SPLITS,
    rounded up to a power of two.
    """
    row = tl.program_id(0)
    rows = tl.num_programs(0)
    part = tl.arange(0, SHARES)
    columns = tl.arange(0, given.shape.VALUES)
    at = part.to(tl.int64) * rows + row
    maximum = tl.load(parts.maximum + at, mask=part < SPLITS, other=0.0)
    log_sum = tl.load(parts.log_sum + at, mask=part < SPLITS, other=float("inf"))
    some = log_sum != float("inf")  # True for NaN
    top = tl.max(tl.where(some, maximum, float("-inf")), 0)
    blind = tl.max(some.to(tl.int32), 0) == 0
    if given.sinks is not None:
        head = (row // given.query.length) % given.query.heads
        sink = tl.load(given.sinks + head * given.sinks_apart).to(tl.float32)
        top = tl.where(sink > top, sink, top)
    top = tl.where(blind, 0.0, top)
    terms = tl.where(some, tl.exp2(((maximum - top) + log_sum) * LOG2E), 0.0)
    total = tl.sum(terms, 0)
    if given.sinks is not None:
        total = total + tl.exp2((sink - top) * LOG2E)
    total = tl.where(blind, 1.0, total)
    inside = (part[:, None] < SPLITS) & (columns[None, :] < given.columns)
    outputs = tl.load(parts.output + at[:, None] * given.columns + columns[None, :], mask=inside, other=0.0)
    output = tl.sum(tl.where(some[:, None], outputs * (terms / total)[:, None], 0.0), 0)
    tl.store(found.output + row.to(tl.int64) * given.columns + columns, output, mask=columns < given.columns)
    if found.maximum is not None:
        tl.store(found.maximum + row, top)
        tl.store(found.log_sum + row, tl.where(blind, float("inf"), tl.log(total)))
