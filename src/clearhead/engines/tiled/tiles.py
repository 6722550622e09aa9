"""The one maker of score tiles: which part of the matrix comes next, and its scores.

A block is all the keys that some rows of the matrix may see. The tiled engine and every inspection go through the
matrix block by block, so what no query of a block may see is never computed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.dropout import factors
from clearhead.base.shapes import unflatten
from clearhead.problem import regions
from clearhead.problem.problem import Problem
from clearhead.problem.regions import Block, head_part
from clearhead.scores.base import Pairwise, by_tile, capped


def no_keys(problem: Problem, query: Tensor) -> Tensor:
    """The output of queries that see nothing: zeros, still joined to the inputs, so that gradients are zero too."""
    assert problem.value is not None
    zeros = query.new_zeros(*query.shape[:3], problem.value.shape[-1])
    if not problem.needs_grad:
        return zeros
    scores = problem.scores
    learnt = (scores.weight,) if isinstance(scores, Pairwise) else tuple(scores.score.parameters())
    inputs = (query, problem.query, problem.key, problem.value, *learnt, problem.sinks, *problem.added)
    joined = (t.flatten()[:1] for t in inputs if t is not None)
    for tensor in joined:
        zeros = zeros + tensor.masked_fill(torch.ones_like(tensor, dtype=torch.bool), 0.0).sum()
    return zeros


def raw_scores(problem: Problem, block: Block) -> Tensor:
    """The scores of a block before mask and bias, (b, h, q, k), in float32 at least."""
    scores = problem.scores
    query = scores.query[block.batch, block.heads, block.queries]
    key = head_part(scores.key, problem.groups, block)[:, :, block.keys]
    if not query.shape[1]:
        return query.new_zeros(*query.shape[:3], key.shape[2], dtype=accumulated(query.dtype))
    if isinstance(scores, Pairwise):
        return pairwise(scores, query, key)
    return by_tile(scores._replace(query=query, key=key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)))


def scores(problem: Problem, block: Block) -> Tensor:
    """The scores of a block, with the bias, and −∞ where a pair is not allowed."""
    return finish(problem, block, raw_scores(problem, block))


def stream(problem: Problem) -> Iterator[tuple[Block, Tensor]]:
    """The scores of a guarded problem, block by block."""
    for block in regions.blocks(problem, regions.LOOK):
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
    return capped(tile, lowered.softcap)


def _over_pairs(lowered: Pairwise, query: Tensor, key: Tensor) -> Tensor:
    """Σ_d weight_d · φ(query_d, key_d) for the φ that are no matrix product: (b, h, q, k, D) numbers on the way."""
    query = unflatten(query, 1, key.shape[1], -1).unsqueeze(-2)  # (b, hk, groups, q, 1, D)
    key = key[:, :, None, None]  # (b, hk, 1, 1, k, D)
    pairs = torch.tanh(query + key) if lowered.phi == "tanh_add" else (query - key).square()
    tile = pairs.sum(-1) if lowered.weight is None else pairs @ lowered.weight.to(pairs.dtype)
    return tile.flatten(1, 2)
