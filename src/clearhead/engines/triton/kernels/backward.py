"""The backward pass, from each query's maximum, log_sum and δ (docs/maths/softmax.md and statistics.md).

    P = e^(s − maximum − log_sum)    Ṗ = D (Ȯ · V) + the gradients of statistics    Ṡ = P (Ṗ − δ)

One program sums the gradients of a block of queries, and another program the gradients of a block of keys: no two
programs write one number, and the sums have one order, so that each run gives the same bits.
"""

import triton
import triton.language as tl

from clearhead.engines.triton.kernels import score
from clearhead.engines.triton.kernels.numbers import LOG2E, product
from clearhead.engines.triton.kernels.tile import along, block_of, kept, matrix, tiles, touches, values


@triton.jit
def add_sent(upstream, logs, sent, b, h, i, j, queries, keys):
    """Add to Ṗ the gradients that statistics send back to the weights: see `Sent`."""
    inside = i < queries
    if sent.log_weight is not None:  # −∞ for a weight of 0, whose product is not read
        upstream += along(sent.numbers, b, h, i, inside, 0.0, sent.log_weight) * logs
    if sent.distance is not None:
        far = tl.abs(along(sent.places, b, h, i, inside, 0, sent.position) - j).to(tl.float32)
        upstream += along(sent.numbers, b, h, i, inside, 0.0, sent.distance) * far
    if sent.received is not None or sent.mean is not None:
        counted = tl.zeros_like(upstream)
        if sent.received is not None:
            counted += along(sent.received, b, h, j, j < keys, 0.0)
        if sent.mean is not None:
            counted += matrix(sent.mean, b, h, i // sent.tall, j // sent.wide, inside & (j < keys))
        if sent.factors is not None:
            counted = counted * along(sent.numbers, b, h, i, inside, 0.0, sent.factors)
        upstream += counted
    if sent.indices is not None:
        for place in range(0, sent.number):
            at = along(sent.indices, b, h, i, inside, -1, place)
            upstream += tl.where(j == at, along(sent.weights, b, h, i, inside, 0.0, place), 0.0)
    return upstream


@triton.jit
def slopes(given, rows, sent, s, upstream, b, h, i, j):
    """Compute P after dropout, and Ṡ before the softcap; `upstream`: Ȯ · V."""
    inside = i < given.query.length
    if sent is None:
        maximum = along(rows.maximum, b, h, i, inside, 0.0)
        log_sum = along(rows.log_sum, b, h, i, inside, float("inf"))
        delta = along(rows.delta, b, h, i, inside, 0.0)
    else:
        maximum = along(sent.numbers, b, h, i, inside, 0.0, sent.maximum)
        log_sum = along(sent.numbers, b, h, i, inside, float("inf"), sent.log_sum)
        delta = along(sent.numbers, b, h, i, inside, 0.0, sent.delta)
    logs = (s - maximum) - log_sum
    p = tl.where(s == float("-inf"), 0.0, tl.exp2(logs * LOG2E))
    if sent is not None:
        upstream = add_sent(upstream, logs, sent, b, h, i, j, given.query.length, given.key.length)
    dropped = p
    if given.dropout is not None:
        keep = kept(given, b, h, i, j)
        dropped = tl.where(keep, p * given.dropout.factor, 0.0)
        upstream = tl.where(keep, upstream * given.dropout.factor, 0.0)
    slope = p * (upstream - delta)
    slope = tl.where(p == 0.0, 0.0, slope)  # 0 · ∞ would be NaN
    if sent is not None and sent.best is not None:
        best = along(sent.numbers, b, h, i, inside, 0.0, sent.best)
        slope += tl.where(j == along(sent.places, b, h, i, inside, -1, sent.best_key), best, 0.0)
    return dropped, slope


@triton.jit
def before_softcap(given, slope, capped):
    """Compute the gradient of the scores before the softcap, whose derivative is 1 − (t / c)²."""
    if given.softcap is not None:
        part = capped / given.softcap
        return tl.where(slope == 0.0, 0.0, slope * (1.0 - part * part))  # t of a masked pair may be ∞ − ∞
    else:
        return slope


@triton.jit
def sent_to(given, grad, b, h, i, columns):
    """Load the gradient of the output of queries i at these columns; the two broadcast to the result."""
    return matrix(grad, b, h, i, columns, (i < given.query.length) & (columns < given.columns))


@triton.jit
def to_query_kernel(given, rows, grad, sent, to, to_weight):
    """Compute the gradients of a block of queries, each without its factor: see score.py."""
    QUERIES: tl.constexpr = given.shape.QUERIES
    KEYS: tl.constexpr = given.shape.KEYS
    query, key = given.query, given.key
    block, places, b, h, _head = block_of(tl.program_id(0), given.query.length, given.query.heads, QUERIES)
    key_head = h // given.groups
    i = places[:, None]
    own = score.rows(given, query, b, h, places)
    columns = tl.arange(0, given.shape.VALUES)
    if grad is not None:
        sent_back = sent_to(given, grad, b, h, i, columns[None, :])  # (Q, E)
    acc = score.nothing(given, QUERIES)
    for part in tl.static_range(given.shape.RANGES):
        first, last = tiles(given, b, h, block, part)
        for key_block in range(first, last):
            js = key_block * KEYS + tl.arange(0, KEYS)
            j = js[None, :]
            s, capped, which = score.tile(given, own, b, h, key_head, block, key_block, places, js, False)
            upstream = tl.zeros((QUERIES, KEYS), tl.float32)
            if grad is not None:  # (Q, E) @ (E, K)
                upstream = product(sent_back, values(given, b, key_head, j, columns[:, None]), upstream, given.shape)
            _, slope = slopes(given, rows, sent, s, upstream, b, h, i, j)
            slope = before_softcap(given, slope, capped)
            acc = score.add(given, acc, query, key, b, h, key_head, places, js, which, slope, to, to_weight)
    score.store(given, acc, query, b, h, places, to)


@triton.jit
def to_key_kernel(given, rows, grad, sent, to, to_value):
    """Compute the gradients of a block of keys and of its values, from the query heads of its group in turn."""
    QUERIES: tl.constexpr = given.shape.QUERIES
    KEYS: tl.constexpr = given.shape.KEYS
    query, key = given.query, given.key
    block, js, b, key_head, head = block_of(tl.program_id(0), given.key.length, key.heads, KEYS)
    j = js[:, None]
    own = score.rows(given, key, b, key_head, js)
    columns = tl.arange(0, given.shape.VALUES)
    if grad is not None:
        own_values = values(given, b, key_head, j, columns[None, :])  # (K, E)
    acc = score.nothing(given, KEYS)
    acc_values = tl.zeros((KEYS, given.shape.VALUES), tl.float32)
    for member in range(0, given.groups):
        h = key_head * given.groups + member
        for query_block in tl.range(0, tl.cdiv(given.query.length, QUERIES), disable_licm=True):
            if touches(given, b, h, query_block, block):
                places = query_block * QUERIES + tl.arange(0, QUERIES)
                i = places[None, :]
                s, capped, which = score.tile(given, own, b, h, key_head, query_block, block, places, js, True)
                upstream = tl.zeros((KEYS, QUERIES), tl.float32)
                if grad is not None:  # (K, E) @ (E, Q)
                    sent_back = sent_to(given, grad, b, h, i, columns[:, None]).to(own_values.dtype)
                    upstream = product(own_values, sent_back, upstream, given.shape)
                dropped, slope = slopes(given, rows, sent, s, upstream, b, h, i, j)
                if grad is not None:
                    acc_values = product(dropped, tl.trans(sent_back), acc_values, given.shape)
                slope = before_softcap(given, slope, capped)
                acc = score.add(given, acc, key, query, b, key_head, h, js, places, which, slope, to, None)
    score.store(given, acc, key, b, key_head, js, to)
    if grad is not None:
        at = (head.to(tl.int64) * given.key.length + j) * given.columns + columns[None, :]
        tl.store(to_value + at, acc_values, mask=(j < given.key.length) & (columns[None, :] < given.columns))


@triton.jit
def slopes_kernel(given, rows, grad, sent, first_block, blocks, to):
    """Compute Ṡ, the gradient of a bias, for some blocks of queries and all keys, (B, H, blocks · QUERIES, Lk)."""
    QUERIES: tl.constexpr = given.shape.QUERIES
    KEYS: tl.constexpr = given.shape.KEYS
    across = tl.cdiv(given.key.length, KEYS)
    program = tl.program_id(0)
    key_block, row, head = program % across, (program // across) % blocks, program // (across * blocks)
    b, h = head // given.query.heads, head % given.query.heads
    key_head = h // given.groups
    block = first_block + row
    places, js = block * QUERIES + tl.arange(0, QUERIES), key_block * KEYS + tl.arange(0, KEYS)
    i, j = places[:, None], js[None, :]
    slope = tl.zeros((QUERIES, KEYS), tl.float32)
    if touches(given, b, h, block, key_block):
        own = score.rows(given, given.query, b, h, places)
        s, _, _ = score.tile(given, own, b, h, key_head, block, key_block, places, js, False)
        upstream = tl.zeros((QUERIES, KEYS), tl.float32)
        if grad is not None:
            columns = tl.arange(0, given.shape.VALUES)
            sent_back = sent_to(given, grad, b, h, i, columns[None, :])
            upstream = product(sent_back, values(given, b, key_head, j, columns[:, None]), upstream, given.shape)
        _, slope = slopes(given, rows, sent, s, upstream, b, h, i, j)
    at = ((head.to(tl.int64) * blocks + row) * QUERIES + tl.arange(0, QUERIES)[:, None]) * given.key.length + j
    tl.store(to + at, slope, mask=j < given.key.length)
