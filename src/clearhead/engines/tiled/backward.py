"""The gradients of one block of rows, written out: what the backward pass adds up, block by block.

With S the finished scores, P = softmax(S) (with sinks, less than 1 in sum), D the dropout's factors, A = P ∘ D and
O = A·V, and a dot for the gradient of the loss (Dao et al. 2022, "FlashAttention", appendix B):

    V̇ = Aᵀ·Ȯ        Ṗ = (Ȯ·Vᵀ) ∘ D        δ_i = Σ_j P_ij Ṗ_ij        Ṡ = P ∘ (Ṗ − δ)        sink_h: −Σ_i p_sink,i δ_i

The bias is added last, so its gradient is Ṡ. The softcap's derivative is 1 − (t/c)², where t is the capped score. Below
it stands scale · Σ_d w_d φ(q_id, k_jd), whose derivatives are those of φ: q·k, tanh(q + k), (q − k)².
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.shapes import Sizes, part, unflatten
from clearhead.biases.base import Added
from clearhead.engines.tiled import tiles
from clearhead.problem.problem import Problem
from clearhead.problem.regions import Region, cut, of_keys
from clearhead.scores.base import Pairwise


class Gradients(NamedTuple):
    """The sums so far, shaped as the problem's tensors, in float32 at least; None where none is wanted."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    weight: Tensor | None
    sinks: Tensor | None
    dense: Tensor | None
    relative: Tensor | None


Operands = tuple[Tensor | None, ...]  # in the order of `Gradients`


def operands(problem: Problem) -> Operands:
    """What the gradients are for."""
    scores, added = problem.scores, problem.bias or Added()
    weight = scores.weight if isinstance(scores, Pairwise) else None
    return scores.query, scores.key, problem.value, weight, problem.sinks, added.dense, added.relative


def with_operands(problem: Problem, tensors: Operands) -> Problem:
    """The same problem over other tensors."""
    query, key, value, weight, sinks, dense, relative = tensors
    assert query is not None and key is not None
    scores = problem.scores._replace(query=query, key=key)
    if isinstance(scores, Pairwise):
        scores = scores._replace(weight=weight)
    bias = None if problem.bias is None else Added(dense, relative)
    return problem._replace(scores=scores, value=value, sinks=sinks, bias=bias)


def without_operands(problem: Problem) -> Problem:
    """What a graph may keep until the backward pass: the operands themselves are autograd's to save, and to free."""
    nothing = torch.empty(0, device=problem.query.device, dtype=problem.query.dtype)
    return with_operands(problem, (nothing, nothing, None, None, None, None, None))


@torch.no_grad()
def gradients(problem: Problem, every: list[Region], wanted: tuple[bool, ...], grad: Tensor) -> Operands:
    """The gradients to the operands, each of its operand's dtype; None where not wanted. `grad` is the output's."""
    tensors = operands(problem)
    sums = Gradients(
        *(
            torch.zeros_like(t, dtype=accumulated(t.dtype), memory_format=torch.contiguous_format)
            if t is not None and want
            else None
            for t, want in zip(tensors, wanted, strict=True)
        )
    )
    with torch.autocast(problem.query.device.type, enabled=False):
        for region in every:
            if region.keys.stop > region.keys.start:
                _add(cut(problem, region), region, sums, grad[region.batch, region.heads, region.queries], problem)
    return tuple(None if s is None or t is None else s.to(t.dtype) for s, t in zip(sums, tensors, strict=True))


def _add(problem: Problem, region: Region, sums: Gradients, grad: Tensor, whole: Problem) -> None:
    """Add the gradients of a part, the region of the whole, to the sums."""
    lowered = problem.lowered
    assert lowered is not None and problem.value is not None
    dtype = accumulated(problem.query.dtype)
    query, key, value, grad = (t.to(dtype) for t in (lowered.query, lowered.key, problem.value, grad))
    capped = tiles.pairwise(lowered, query, key)
    scores = tiles.finish(problem, capped)
    weights = tiles.weights(problem, scores)  # P
    upstream = tiles.grouped_product(grad, value.transpose(-1, -2))  # Ṗ, once the dropout's factors are in
    kept = weights
    if problem.seed is not None:
        factors = tiles.dropped(problem, torch.ones_like(weights))
        kept, upstream = weights * factors, upstream.mul_(factors)
    if sums.value is not None:
        of_keys(sums.value, whole.groups, region).add_(_to_keys(kept, grad, value.shape[1]))
    if problem.visible is not None:  # not 0 · ∞ where a value that others may see is huge
        upstream.masked_fill_(weights == 0, 0.0)
    delta = torch.einsum("bhqk,bhqk->bhq", weights, upstream)
    if sums.sinks is not None:
        sinks = tiles.sinks(problem)
        assert sinks is not None
        none = torch.logaddexp(scores.logsumexp(-1), sinks)  # the log of the denominator
        blind = scores.amax(-1) == -torch.inf
        share = (sinks - none).exp_().masked_fill_(blind, 0.0)
        sums.sinks[region.heads].sub_((share * delta).sum((0, 2)))
    slope = upstream.sub_(delta.unsqueeze(-1)).mul_(weights)  # Ṡ
    if sums.dense is not None:
        target = part(sums.dense, *region.sides)
        target.add_(slope.sum_to_size(target.shape))
    if sums.relative is not None:
        _add_along(sums.relative, slope, region, whole.sizes)
    if lowered.softcap is not None:
        slope.mul_(1 - (capped / lowered.softcap).square_())
    _add_pairs(lowered, region, sums, slope, query, key, whole.groups)


def _to_keys(tile: Tensor, rows: Tensor, key_heads: int) -> Tensor:
    """tileᵀ · rows, (b, hk, k, d), summed over the query heads that share a key head."""
    b, h, q, k = tile.shape
    shape = (b, key_heads, h // key_heads * q)
    return tile.reshape(*shape, k).transpose(-1, -2) @ rows.reshape(*shape, rows.shape[-1])


def _add_along(sums: Tensor, slope: Tensor, region: Region, sizes: Sizes) -> None:
    """Sum a tile along its diagonals: to one number a distance."""
    rows, columns = slope.shape[-2:]
    # each row one place further right than the one below it: then distances stand in columns
    skewed = torch.nn.functional.pad(slope.flip(-2), (0, rows)).flatten(-2)[..., : rows * (rows + columns - 1)]
    along = unflatten(skewed, -1, rows, rows + columns - 1).sum(-2)
    first = sizes.queries - region.queries.stop + region.keys.start
    target = part(sums, region.batch, region.heads)[..., first : first + rows + columns - 1]
    target.add_(along.sum_to_size(target.shape))


def _add_pairs(
    lowered: Pairwise, region: Region, sums: Gradients, slope: Tensor, query: Tensor, key: Tensor, groups: int
) -> None:
    """The gradients of scale · Σ_d w_d φ(q_id, k_jd), from its slope (b, h, q, k)."""
    weight = None if lowered.weight is None else lowered.weight.to(query.dtype)
    if lowered.phi == "mul":
        to_query = tiles.grouped_product(slope, key)
        to_key = _to_keys(slope, query, key.shape[1]) if sums.key is not None else None
        to_weight = (to_query * query).sum((0, 1, 2)) if sums.weight is not None else None
        if weight is not None:
            to_query, to_key = to_query * weight, None if to_key is None else to_key * weight
    else:
        to_query, to_key, to_weight = _over_pairs(lowered, weight, slope, query, key)
    if sums.query is not None:
        sums.query[region.batch, region.heads, region.queries].add_(to_query, alpha=lowered.scale)
    if sums.key is not None and to_key is not None:
        of_keys(sums.key, groups, region).add_(to_key, alpha=lowered.scale)
    if sums.weight is not None and to_weight is not None:
        sums.weight.add_(to_weight, alpha=lowered.scale)


def _over_pairs(
    lowered: Pairwise, weight: Tensor | None, slope: Tensor, query: Tensor, key: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients, less the scale, to query, key and weight for the φ that are no matrix product."""
    query = unflatten(query, 1, key.shape[1], -1).unsqueeze(-2)  # (b, hk, groups, q, 1, D)
    slope = unflatten(slope, 1, key.shape[1], -1).unsqueeze(-1)  # (b, hk, groups, q, k, 1)
    key = key[:, :, None, None]  # (b, hk, 1, 1, k, D)
    if lowered.phi == "tanh_add":
        pairs = torch.tanh(query + key)
        to_weight = torch.tensordot(slope.flatten(), pairs.flatten(0, -2), 1)
        each = pairs.square_().neg_().add_(1.0).mul_(slope)  # φ̇ of either side
        to_query, to_key = each.sum(-2), each.sum((2, 3))
    else:
        pairs = query - key
        each = pairs * slope
        to_weight = torch.einsum("bhgqkd,bhgqkd->d", each, pairs)
        to_query, to_key = 2 * each.sum(-2), -2 * each.sum((2, 3))
    if weight is not None:
        to_query, to_key = to_query * weight, to_key * weight
    return to_query.flatten(1, 2), to_key, to_weight
