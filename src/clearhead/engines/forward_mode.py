"""Forward mode: the tangent of the output in blocks, and the output with its own backward pass.

Plain operations under forward mode keep the graph of every block if the primal requires grad too. Here the primal is
one operation with the gradients of `tiled` (`operation.py`), and the tangent is another operation, which saves only the
operands and their tangents. Higher derivatives go through plain blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated, in_memory_still
from clearhead.base.torch_state.active import JVP
from clearhead.base.torch_state.batched import followed_back, views
from clearhead.base.torch_state.tensor_kind import has_own_dispatch
from clearhead.engines.tiled import tiles
from clearhead.problem import regions
from clearhead.problem.guard import guard
from clearhead.problem.packing import operands, with_operands
from clearhead.problem.problem import Problem
from clearhead.problem.regions import cut
from clearhead.scores.pair_functions import PHIS

TENSORS = 8  # tensors of a block's size in memory at once; the blocks of the primal need fewer


def serves(problem: Problem) -> bool:
    """Return whether only forward mode differentiates this problem, and its operands are all that is differentiated."""
    if problem.lowered is None or problem.by_function or 0 in problem.sizes.shape:
        return False
    mode = problem.mode
    alone = mode.transforms == (JVP,) or (not mode.transforms and mode.forward_level >= 0)
    if mode.traced or not alone:
        return False
    return not any(t is not None and has_own_dispatch(t) for t in operands(problem))


class Tangent(torch.autograd.Function):
    """The tangent of the output, computed one block at a time."""

    @staticmethod
    def forward(rest: Problem, count: int, *both: Tensor | None) -> Tensor:
        return _along(rest, both[:count], both[count:])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.rest, ctx.count, *both = inputs
        ctx.save_for_backward(*both)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        wanted, both = ctx.needs_input_grad[2:], in_memory_still(ctx.saved_tensors)
        with torch.enable_grad():
            own = views(both)
            found = _along(ctx.rest, own[: ctx.count], own[ctx.count :])
        return (None, None, *followed_back(found, grad, own, wanted, create_graph=torch.is_grad_enabled()))


def _along(rest: Problem, tensors: Sequence[Tensor | None], tangents: Sequence[Tensor | None]) -> Tensor:
    """Compute the derivative of the output along the operands' tangents; an operand without a tangent is constant.

    With a dot for tangents: Ṗ_ij = P_ij (Ṡ_ij − μ_i), μ_i = Σ_j P_ij Ṡ_ij + p_sink,i ṡink, and Ȯ = (D ∘ Ṗ) V + (D ∘ P)
    V̇.
    """
    primal = guard(with_operands(rest, tensors))
    zeros = [
        None if t is None else torch.zeros_like(t) if d is None else d for t, d in zip(tensors, tangents, strict=True)
    ]
    moving = with_operands(rest, zeros)
    every = list(regions.walk(primal, regions.BUDGET // TENSORS))
    blocks = ((region, _block(cut(primal, region), cut(moving, region))) for region in every)
    if torch.is_grad_enabled():
        return regions.assemble([block for _, block in blocks], every)
    assert primal.value is not None
    output = primal.query.new_empty(
        *primal.query.shape[:3], primal.value.shape[-1], dtype=accumulated(primal.query.dtype)
    )
    for region, block in blocks:  # write each block at once: no new memory stays allocated between two blocks
        output[region.sides[:3]] = block
    return output


def _block(problem: Problem, moving: Problem) -> Tensor:
    """Compute the tangent of a part with all allowed keys of its queries; `moving` is the same part of the tangents."""
    value, to_value = problem.value, moving.value
    assert value is not None and to_value is not None
    slope, capped = _score_tangents(problem, moving)
    tile = tiles.finish(problem, capped)
    if moving.bias is not None:
        slope = slope + moving.bias.tile(*(slice(None),) * 4, moving.sizes).to(slope.dtype)
    sinks, to_sinks = tiles.sinks(problem), tiles.sinks(moving)
    weights = tiles.weights(problem, tile) if tile.shape[-1] else tile
    mean = (weights * slope).sum(-1, keepdim=True)
    if sinks is not None and to_sinks is not None and tile.shape[-1]:
        share = torch.sigmoid(sinks - tile.logsumexp(-1)).unsqueeze(-1)  # 1 in fully masked rows, whose weights are 0
        mean = mean + share * to_sinks.unsqueeze(-1)
    change = weights * (slope - mean)
    to_output = tiles.grouped_product(tiles.dropped(problem, change), value.to(change.dtype))
    return to_output + tiles.grouped_product(tiles.dropped(problem, weights), to_value.to(change.dtype))


def _score_tangents(problem: Problem, moving: Problem) -> tuple[Tensor, Tensor]:
    """Compute the tangents of the scores before bias and mask, and these scores."""
    low, along = problem.lowered, moving.lowered
    assert low is not None and along is not None
    dtype = accumulated(low.query.dtype)
    query, key, to_query, to_key = (t.to(dtype) for t in (low.query, low.key, along.query, along.key))
    weight, to_weight = (None if t is None else t.to(dtype) for t in (low.weight, along.weight))
    capped = tiles.pairwise(low, query, key)
    if low.phi == "mul":
        if weight is not None:
            to_query = to_query * weight if to_weight is None else to_query * weight + query * to_weight
            query = query * weight
        slope = tiles.grouped_product(to_query, key.mT) + tiles.grouped_product(query, to_key.mT)
    else:
        phi = PHIS[low.phi]
        both = phi.combine(*tiles.facing(query, key))
        pairs = phi.value(both)
        change = phi.derivative(both, pairs, None) * phi.combine(*tiles.facing(to_query, to_key))
        slope = change.sum(-1) if weight is None else change @ weight
        if to_weight is not None:
            slope = slope + pairs @ to_weight
        slope = slope.flatten(1, 2)
    slope = slope * low.scale
    if low.softcap is not None:
        slope = slope * (1 - (capped / low.softcap).square())
    return slope, capped
