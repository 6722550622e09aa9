"""The one maker of score tiles: which part of the matrix comes next, and its scores.

A block is all the keys that some rows of the matrix may see. The tiled engine and every inspection go through the
matrix block by block, so what no query of a block may see is never computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead._dropout import factors
from clearhead._problem import Problem
from clearhead._shapes import Sizes, unflatten
from clearhead._values import compiling
from clearhead.scores.base import Pairwise, accumulated, checked_tile

ROWS = 256  # the most queries to a block where the mask depends on the query: more would skip less
EVERY = slice(None)
BUDGET = 2**21  # elements of a block's scores, or of what is made on the way to them
TRACED = 2**24  # the same in compiled code, where more blocks than one hold for one size alone
LOOK = 2**20  # the same for an inspection, which makes a few passes over each block: it should stay in the cache


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the matrix (batch, heads, queries, keys); `masked`: some pair in it is not allowed."""

    batch: slice
    heads: slice
    queries: slice
    keys: slice
    masked: bool

    @classmethod
    def whole(cls, sizes: Sizes, masked: bool) -> Block:
        """All of the matrix."""
        batch, heads, queries, keys = (slice(0, size) for size in sizes.shape)
        return cls(batch, heads, queries, keys, masked)

    @property
    def sides(self) -> tuple[slice, slice, slice, slice]:
        return self.batch, self.heads, self.queries, self.keys

    @property
    def area(self) -> int:
        return math.prod(s.stop - s.start for s in self.sides)


def batch_groups(start: np.ndarray, stop: np.ndarray, batch: int) -> list[slice]:
    """Consecutive sequences with the same spans, which can be computed together."""
    if start.shape[0] == 1:
        return [slice(0, batch)]
    differ = (start[1:] != start[:-1]).any((1, 2)) | (stop[1:] != stop[:-1]).any((1, 2))
    edges = [0, *(np.flatnonzero(differ) + 1).tolist(), batch]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def blocks(problem: Problem, budget: int) -> Iterator[Block]:
    """Go through the matrix in blocks of at most about `budget` elements of work memory.

    The order is by sequence, then by head, then by query, the same cuts for all queries: see `assemble`.
    """
    sizes, groups = problem.sizes, problem.groups
    if not sizes.batch or not sizes.heads or not sizes.queries:
        return
    if compiling() and math.prod(sizes.shape) * width(problem) <= TRACED:
        # a slice with an end would tie the code to this size
        yield Block(EVERY, EVERY, EVERY, EVERY, masked=problem.spans is not None)
        return
    for batch, bands in _bands(problem):
        row = max(1, max(keys.stop - keys.start for _, keys, _ in bands) * width(problem))
        rows = max(1, min(max(q.stop - q.start for q, _, _ in bands), budget // row))
        head_step = max(groups, min(sizes.heads, budget // (row * rows)) // groups * groups)
        batch_step = max(1, budget // (row * rows * head_step))
        for b in range(batch.start, batch.stop, batch_step):
            for h in range(0, sizes.heads, head_step):
                some = slice(b, min(b + batch_step, batch.stop)), slice(h, min(h + head_step, sizes.heads))
                for queries, keys, masked in bands:
                    for q in range(queries.start, queries.stop, rows):
                        yield Block(*some, slice(q, min(q + rows, queries.stop)), keys, masked)


def _bands(problem: Problem) -> Iterator[tuple[slice, list[tuple[slice, slice, bool]]]]:
    """For each group of sequences with the same spans: bands of queries, the hull of their keys, if it has holes."""
    sizes, spans = problem.sizes, problem.spans
    if spans is None or problem.edges is None:  # no mask, or one whose edges are hidden
        yield slice(0, sizes.batch), [(slice(0, sizes.queries), slice(0, sizes.keys), spans is not None)]
        return
    start, stop = problem.edges
    for batch in batch_groups(start, stop, sizes.batch):
        first, last = (edge[0 if start.shape[0] == 1 else batch.start] for edge in (start, stop))  # (H or 1, Lq or 1)
        varies = first.shape[-1] > 1
        step = ROWS if varies else max(sizes.queries, 1)
        bands = []
        for row in range(0, sizes.queries, step):
            queries = slice(row, min(row + step, sizes.queries))
            lows, highs = (edge[:, queries if varies else EVERY] for edge in (first, last))
            some = highs > lows
            low, high = (int(lows[some].min()), int(highs.max())) if some.any() else (0, 0)
            masked = spans.residual is not None or bool((lows != low).any() or (highs != high).any())
            bands.append((queries, slice(low, high), masked))
        if bands:
            yield batch, bands


def assemble(parts: Sequence[Tensor], every: Sequence[Block]) -> Tensor:
    """Join the blocks' outputs (b, h, q, ...), in the order of `blocks`, to one (B, H, Lq, ...)."""
    batches: dict[int, dict[int, list[Tensor]]] = {}
    for block, output in zip(every, parts, strict=True):
        batches.setdefault(block.batch.start, {}).setdefault(block.heads.start, []).append(output)
    return join([join([join(rows, 2) for rows in heads.values()], 1) for heads in batches.values()], 0)


def join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def no_keys(problem: Problem, query: Tensor) -> Tensor:
    """The output of queries that see nothing: zeros, still joined to the inputs, so that gradients are zero too."""
    assert problem.value is not None
    zeros = query.new_zeros(*query.shape[:3], problem.value.shape[-1])
    if not problem.needs_grad:
        return zeros
    projected = () if problem.lowered is None else (problem.lowered.query, problem.lowered.key)
    inputs = (query, problem.key, problem.value, *projected, *problem.added, *problem.score.parameters())
    joined = (t.flatten()[:1] for t in inputs)
    for tensor in joined:
        zeros = zeros + tensor.masked_fill(torch.ones_like(tensor, dtype=torch.bool), 0.0).sum()
    return zeros


def width(problem: Problem) -> int:
    """Numbers made on the way to one score: a matrix product makes none, other scores one a dimension."""
    lowered = problem.lowered
    if lowered is not None:
        return 1 if lowered.phi == "mul" else lowered.key.shape[-1]
    return max(problem.query.shape[-1], problem.key.shape[-1])


def raw_scores(problem: Problem, block: Block) -> Tensor:
    """The scores of a block before mask and bias, (b, h, q, k), in float32 at least."""
    lowered = problem.lowered
    query, key = (problem.query, problem.key) if lowered is None else (lowered.query, lowered.key)
    query = query[block.batch, block.heads, block.queries]
    key = head_part(key, problem.groups, block)[:, :, block.keys]
    if not query.shape[1]:
        return query.new_zeros(*query.shape[:3], key.shape[2], dtype=accumulated(query.dtype))
    if lowered is None:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        return checked_tile(problem.score, query, key)
    return pairwise(lowered, query, key)


def scores(problem: Problem, block: Block) -> Tensor:
    """The scores of a block, with the bias, and −∞ where a pair is not allowed."""
    return finish(problem, block, raw_scores(problem, block))


def stream(problem: Problem) -> Iterator[tuple[Block, Tensor]]:
    """The scores of a guarded problem, block by block."""
    for block in blocks(problem, LOOK):
        yield block, scores(problem, block)


def finish(problem: Problem, block: Block, tile: Tensor) -> Tensor:
    """A block's raw scores with its part of the bias, the poison, and −∞ where a pair is not allowed."""
    if problem.bias is not None:
        tile = tile + problem.bias.tile(*block.sides, problem.sizes).to(tile.dtype)
    if problem.poison is not None:
        query, key = problem.poison
        keys = head_part(key, problem.groups, block)[..., block.keys]
        keys = keys.repeat_interleave(tile.shape[1] // keys.shape[1], dim=1)
        tile = tile + query[block.batch, block.heads, block.queries] + keys
    if block.masked and problem.spans is not None:
        tile = tile.masked_fill(~problem.spans.keep(*block.sides, problem.sizes.keys), -torch.inf)
    return tile


def may_be_empty(problem: Problem, block: Block) -> bool:
    """Whether a row of a block may be −∞ alone."""
    return block.masked or problem.bias is not None or problem.lowered is None


def weights(problem: Problem, block: Block, tile: Tensor) -> Tensor:
    """The weights of a block, from its finished scores."""
    return softmax(tile, may_be_empty(problem, block), sinks(problem, block))


def softmax(tile: Tensor, may_be_empty: bool, sinks: Tensor | None = None) -> Tensor:
    """Softmax over keys; −∞ gives 0, and a zero gradient, in a row of nothing else too. `sinks`, (h, 1): see `Dot`.

    The gradient is 0 whatever stands behind the weight: a value near the largest number would make it ∞, and 0 · ∞ NaN.
    """
    if may_be_empty:
        unseen = tile.detach() == -torch.inf
        tile = tile.masked_fill(unseen.all(-1, keepdim=True), 0.0)
    weights = tile.softmax(-1)
    if sinks is not None:
        # e^s / (Σ e^s + e^sink) is the softmax over the keys, times σ(log Σ e^s − sink); written so that the gradient,
        # the sink's own weight, keeps its digits where it is small
        above = sinks.unsqueeze(-1) - tile.logsumexp(-1, keepdim=True)
        weights = weights * torch.exp(-F.softplus(above))
    return weights.masked_fill(unseen, 0.0) if may_be_empty else weights


def sinks(problem: Problem, block: Block) -> Tensor | None:
    """The sinks of a block's heads, (h, 1), of the scores' dtype."""
    if problem.sinks is None:
        return None
    return problem.sinks[block.heads, None].to(accumulated(problem.query.dtype))


def dropped(problem: Problem, block: Block, weights: Tensor) -> Tensor:
    """A block's weights after dropout."""
    if problem.seed is None:
        return weights
    return weights * factors(problem.seed, problem.dropout_p, block.sides, problem.sizes, weights.dtype)


def head_part(tensor: Tensor, groups: int, block: Block) -> Tensor:
    """The key heads (of key, value or poison) that a block's query heads use."""
    heads = range(*block.heads.indices(tensor.shape[1] * groups))
    first, last = (heads[0] // groups, heads[-1] // groups) if len(heads) else (0, -1)
    whole = heads.step == 1 and len(heads) == (last + 1 - first) * groups
    if whole or first == last:
        return tensor[block.batch, first : last + 1]
    return tensor[block.batch, [h // groups for h in heads]]


def grouped_product(left: Tensor, right: Tensor) -> Tensor:
    """(b, h, n, m) @ (b, hk, m, d), each of the hk right heads serving h / hk left heads, without copies of it."""
    b, h, n, m = left.shape
    hk = right.shape[1]
    if h == hk:
        return left @ right
    return (left.reshape(b, hk, h // hk * n, m) @ right).reshape(b, h, n, right.shape[-1])


def pairwise(lowered: Pairwise, query: Tensor, key: Tensor) -> Tensor:
    """The normal form, over query (b, h, q, D) and key (b, hk, k, D): the sum over d, then scale and softcap."""
    dtype = accumulated(query.dtype)
    query, key = query.to(dtype), key.to(dtype)
    if lowered.phi == "mul":
        query = query * lowered.scale if lowered.weight is None else query * (lowered.weight * lowered.scale)
        tile = grouped_product(query, key.transpose(-1, -2))
    else:
        tile = _over_pairs(lowered, query, key) * lowered.scale
    return tile if lowered.softcap is None else lowered.softcap * torch.tanh(tile / lowered.softcap)


def _over_pairs(lowered: Pairwise, query: Tensor, key: Tensor) -> Tensor:
    """Σ_d weight_d · φ(query_d, key_d) for the φ that are no matrix product: (b, h, q, k, D) numbers on the way."""
    query = unflatten(query, 1, key.shape[1], -1).unsqueeze(-2)  # (b, hk, groups, q, 1, D)
    key = key[:, :, None, None]  # (b, hk, 1, 1, k, D)
    pairs = torch.tanh(query + key) if lowered.phi == "tanh_add" else (query - key).square()
    tile = pairs.sum(-1) if lowered.weight is None else pairs @ lowered.weight.to(pairs.dtype)
    return tile.flatten(1, 2)
