"""The forward pass: output, maximum and log_sum of a block of queries, and statistics of its rows in the same pass.

For keys that come in blocks: m is the largest score so far, total = Σ e^(s − m), and acc is the sum of the same terms
times values; a larger m rescales both (docs/maths/softmax.md). All terms are multiplied by 2^−shift, so that no sum of
values overflows; the division by the total cancels the factor.
"""

import triton
import triton.language as tl

from clearhead.engines.triton.kernels import score, summarise
from clearhead.engines.triton.kernels.numbers import LOG2E, product
from clearhead.engines.triton.kernels.tile import block_of, kept, tiles, values


@triton.jit
def with_sink(given, h, m, total):
    """Return the larger of maximum and sink, the total with the sink's term, and the factor of the sums so far.

    In a fully masked row they are 0, 0 and 1.
    """
    blind = total == 0.0
    top = tl.where(blind, 0.0, m)
    if given.sinks is not None:
        sink = tl.load(given.sinks + h * given.sinks_apart).to(tl.float32)
        top = tl.where(blind, 0.0, tl.where(sink > m, sink, m))
        shrink = tl.exp2((m - top) * LOG2E)
        whole = tl.where(blind, 0.0, total * shrink + tl.exp2((sink - top) * LOG2E - given.shift))
        return top, whole, tl.where(blind, 1.0, shrink)
    else:
        return top, total, tl.where(blind, 1.0, 1.0)


@triton.jit
def forward_kernel(given, found, SPLITS: tl.constexpr):
    """Compute one block of queries in each program, and with SPLITS one share of its key blocks.

    The share is the first dimension of the results, (SPLITS, B, H, …): decode.py joins the shares, and adds the sink.
    """
    QUERIES: tl.constexpr = given.shape.QUERIES
    KEYS: tl.constexpr = given.shape.KEYS
    split = tl.program_id(1)
    block, places, b, h, head = block_of(tl.program_id(0), given.query.length, given.query.heads, QUERIES)
    key_head = h // given.groups
    i = places[:, None]
    own = score.rows(given, given.query, b, h, places)
    m = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    if given.value is not None:
        columns = tl.arange(0, given.shape.VALUES)
        acc = tl.zeros((QUERIES, given.shape.VALUES), tl.float32)
    if found.entropy is not None:
        spread = tl.zeros((QUERIES,), tl.float32)
    if found.distance is not None:
        far = tl.zeros((QUERIES,), tl.float32)
    if found.best_key is not None:
        best_key = tl.full((QUERIES,), -1, tl.int32)
    if found.indices is not None:
        top, top_keys = summarise.none_yet(QUERIES, given.shape.TOP)
    share = tl.cdiv(tl.cdiv(given.key.length, KEYS), SPLITS)
    for part in tl.static_range(given.shape.RANGES):
        first, last = tiles(given, b, h, block, part)
        if SPLITS > 1:
            first, last = tl.maximum(first, split * share), tl.minimum(last, (split + 1) * share)
        for key_block in range(first, last):
            js = key_block * KEYS + tl.arange(0, KEYS)
            j = js[None, :]
            s, _, _ = score.tile(given, own, b, h, key_head, block, key_block, places, js, False)
            peak = tl.max(s, 1)
            new = tl.maximum(m, peak)
            safe = tl.where(new == float("-inf"), 0.0, new)
            above = s - safe[:, None]
            p = tl.exp2(above * LOG2E - given.shift)
            shrink = tl.exp2((m - safe) * LOG2E)
            if found.entropy is not None:
                spread = summarise.more_spread(spread, total, m, safe, shrink, above, p)
            if found.distance is not None:
                far = far * shrink + tl.sum(p * summarise.apart(found.position, b, h, i, j, given.query.length), 1)
            if found.best_key is not None:
                best_key = tl.where(
                    peak > m, summarise.first_of(s, peak, tl.arange(0, KEYS), KEYS) + key_block * KEYS, best_key
                )
            if found.indices is not None:
                top, top_keys = summarise.merge(top, top_keys, s, peak, key_block * KEYS, KEYS, given.shape.TOP)
            total = total * shrink + tl.sum(p, 1)
            m = new
            if given.value is not None:
                if given.dropout is not None:
                    p = tl.where(kept(given, b, h, i, j), p * given.dropout.factor, 0.0)
                acc = product(
                    p, values(given, b, key_head, js[:, None], columns[None, :]), acc * shrink[:, None], given.shape
                )
    inside = places < given.query.length
    heads = tl.num_programs(0) // tl.cdiv(given.query.length, QUERIES)
    at = (split * heads + head).to(tl.int64) * given.query.length + places
    odd = total != total
    if SPLITS > 1:
        maximum, whole, factor = tl.where(total == 0.0, 0.0, m), total, tl.where(total == 0.0, 1.0, 1.0)
    else:
        maximum, whole, factor = with_sink(given, h, m, total)
    blind = whole == 0.0
    one = tl.where(blind, 1.0, whole)
    log_sum = tl.where(blind, float("inf"), tl.log(one * given.unshift))
    if given.value is not None:
        inner = inside[:, None] & (columns[None, :] < given.columns)
        output = acc * (factor / one)[:, None]
        tl.store(found.output + at[:, None] * given.columns + columns[None, :], output, mask=inner)
    if found.maximum is not None:
        tl.store(found.maximum + at, maximum, mask=inside)
        tl.store(found.log_sum + at, log_sum, mask=inside)
    if found.entropy is not None:
        entropy = tl.log(one * given.unshift) - spread / one
        tl.store(found.entropy + at, tl.where(blind, 0.0, tl.where(entropy < 0.0, 0.0, entropy)), mask=inside)
    if found.distance is not None:
        tl.store(found.distance + at, far * factor / one, mask=inside)
    if found.best_key is not None:
        tl.store(found.best + at, tl.where(odd, float("nan"), m), mask=inside)
        tl.store(found.best_key + at, best_key.to(tl.int64), mask=inside)
    if found.indices is not None:
        summarise.store_largest(found, at, inside, top, top_keys, maximum, log_sum, given.shape.TOP)
