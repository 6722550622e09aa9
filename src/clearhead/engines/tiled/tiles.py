"""Score tiles: the scores of every pair of a problem, or of a part of one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.dropout import factors
from clearhead.base.shapes import unflatten
from clearhead.base.torch_state.modules import with_parameters
from clearhead.base.torch_state.tensor_kind import is_writable, may_be_nan
from clearhead.problem.packing import operands, with_operands
from clearhead.problem.partial import Partial
from clearhead.problem.problem import Problem
from clearhead.scores.base import Pairwise, by_tile, capped
from clearhead.scores.pair_functions import PHIS

LARGEST_SUBNORMAL = 2.0**-126 - 2.0**-149  # in float32


def no_keys(problem: Problem, query: Tensor) -> Tensor:
    """Return the output of fully masked queries: zeros that depend on the inputs, so that gradients are zero too."""
    assert problem.value is not None
    zeros = query.new_zeros(*query.shape[:3], problem.value.shape[-1])
    return zeros + zero_of(problem, query).to(zeros.dtype) if problem.needs_grad else zeros


def zero_of(problem: Problem, *more: Tensor) -> Tensor:
    """Return a zero that depends on every tensor of the problem that may require grad."""
    scores = problem.scores
    learnt = (scores.weight,) if isinstance(scores, Pairwise) else tuple(scores.score.parameters())
    reads = () if problem.bias is None else (t for t in problem.bias.reads if t.requires_grad)
    inputs = (*more, problem.query, problem.key, problem.value, *learnt, problem.sinks, *problem.added, *reads)
    zero = problem.query.new_zeros(())
    for tensor in (t.flatten()[:1] for t in inputs if t is not None):
        zero = zero + tensor.masked_fill(torch.ones_like(tensor, dtype=torch.bool), 0.0).sum()
    return zero


def new_sum(tensor: Tensor | None, wanted: bool, dtype: torch.dtype | None = None) -> Tensor | None:
    """Return zeros to which gradients of a tensor are added; None if not wanted.

    They have `dtype`, or by default float32 or float64.
    """
    if tensor is None or not wanted:
        return None
    dtype = accumulated(tensor.dtype) if dtype is None else dtype
    return torch.zeros_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


def partial(problem: Problem) -> Partial:
    """Compute the output and the rows of a guarded problem over its keys, in float32 or float64, without sinks."""
    assert problem.value is not None
    tile = scores(problem)
    if not tile.shape[-1]:
        return Partial(
            no_keys(problem, problem.query), tile.new_zeros(tile.shape[:3]), tile.new_full(tile.shape[:3], torch.inf)
        )
    kept = torch.is_grad_enabled() or not is_writable()
    maximum, above, total, blind = exponentials(tile)
    weights = above / total.unsqueeze(-1) if kept else above.div_(total.unsqueeze(-1))
    # exp(−∞) is 0 anyway, except in a row of NaN; with autograd the mask also makes its gradient 0
    if may_be_empty(problem) and (kept or may_be_nan(total)):
        weights = weights.masked_fill(tile.detach() == -torch.inf, 0.0)
    output = grouped_product(dropped(problem, weights), problem.value.to(weights.dtype))
    return Partial(output, maximum, total.log().masked_fill(blind, torch.inf))


def exponentials(tile: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the maximum of each row of finished scores, exp(score − maximum), their sum, and fully masked rows.

    In a fully masked row the maximum is 0 and the sum 1, so that its weights are 0.
    """
    maximum = tile.detach().amax(-1)
    blind = maximum == -torch.inf
    if torch.is_grad_enabled() and may_be_nan(maximum - maximum):
        tile = unseen_apart(tile)
    maximum = maximum.masked_fill(blind, 0.0)
    above = tile - maximum.unsqueeze(-1)
    above = above.exp_() if is_writable() else above.exp()
    return maximum, above, above.sum(-1).masked_fill(blind, 1.0), blind


def unseen_apart(tile: Tensor) -> Tensor:
    """Cut scores of −∞ out of the graph: in a row of NaN their gradient would be NaN."""
    return tile.masked_fill(tile.detach() == -torch.inf, -torch.inf)


def raw_scores(problem: Problem) -> Tensor:
    """Compute the scores before mask and bias, (B, H, Lq, Lk), in float32 or float64."""
    scores = problem.scores
    heads, key_heads = scores.query.shape[1], scores.key.shape[1]
    if not heads:
        return scores.query.new_zeros(
            *scores.query.shape[:3], scores.key.shape[2], dtype=accumulated(scores.query.dtype)
        )
    if isinstance(scores, Pairwise):
        return pairwise(scores, scores.query, scores.key)
    return by_tile(scores._replace(key=scores.key.repeat_interleave(heads // key_heads, dim=1)))


def widened(problem: Problem) -> Problem:
    """Return the problem with operands, and parameters of its score, in the dtype of the tiles.

    So a gradient to which many blocks add is rounded once.
    """
    dtype = accumulated(problem.query.dtype)
    if problem.query.dtype == dtype or not problem.needs_grad:
        return problem
    problem = with_operands(problem, [None if t is None else t.to(dtype) for t in operands(problem)])
    if isinstance(problem.scores, Pairwise):
        return problem
    score = with_parameters(problem.scores.score, lambda p: p.to(dtype))
    return problem._replace(scores=problem.scores._replace(score=score))


def scores(problem: Problem) -> Tensor:
    """Compute the scores of a guarded problem, with the bias, and −∞ at masked pairs."""
    return finish(problem, raw_scores(problem))


def finish(problem: Problem, tile: Tensor) -> Tensor:
    """Add the bias and the poison to raw scores, and set masked pairs to −∞."""
    every = (slice(None),) * 4
    if problem.bias is not None:
        tile = tile + problem.bias.tile(*every, problem.sizes).to(tile.dtype)
    if problem.poison is not None:
        query, key = problem.poison
        tile = tile + query + key.repeat_interleave(tile.shape[1] // max(key.shape[1], 1), dim=1)
    if problem.spans is not None:
        tile = tile.masked_fill(~problem.spans.keep(*every, problem.sizes.keys), -torch.inf)
    return tile


def may_be_empty(problem: Problem) -> bool:
    """Return whether all scores of a row may be −∞."""
    return problem.visible is not None or problem.bias is not None or not isinstance(problem.scores, Pairwise)


def weights(problem: Problem, tile: Tensor) -> Tensor:
    """Compute the weights from the finished scores of all keys of each query."""
    return flush_subnormal(softmax(tile, may_be_empty(problem), sinks(problem)))


def flush_subnormal(weights: Tensor) -> Tensor:
    """Set weights below 2⁻¹²⁶, float32's smallest normal number, to 0, as the kernels of `native` do."""
    if weights.dtype != torch.float32:
        return weights
    return F.threshold(weights, LARGEST_SUBNORMAL, 0.0, inplace=is_writable() and not weights.requires_grad)


def weights_in(tile: Tensor, maximum: Tensor, log_sum: Tensor) -> Tensor:
    """Compute the weights of finished scores from the rows of the whole softmax, without autograd.

    The scores are (b, h, q, k), the rows (b, h, q).
    """
    found = (tile - maximum.unsqueeze(-1)).sub_(log_sum.unsqueeze(-1)).exp_()
    return flush_subnormal(found.masked_fill_(tile == -torch.inf, 0.0))  # exp(−∞) is NaN in a row of NaN


def softmax(tile: Tensor, may_be_empty: bool, sinks: Tensor | None = None) -> Tensor:
    """Compute the softmax over keys, with sinks (h, 1).

    A score of −∞ gives a weight of 0 with gradient 0, even if the whole row is −∞, and even if the gradient of the
    weight is ∞, as for a huge value: 0 · ∞ would be NaN.
    """
    if may_be_empty:
        unseen = tile.detach() == -torch.inf
        # replace −∞ by a constant −∞: in a row of NaN its gradient would be NaN
        tile = tile.masked_fill(unseen, -torch.inf).masked_fill(unseen.all(-1, keepdim=True), 0.0)
    weights = tile.softmax(-1)
    if sinks is not None:
        # e^s / (Σ e^s + e^sink) is the softmax over the keys, times σ(log Σ e^s − sink). With softplus the gradient,
        # which is the weight of the sink, keeps its digits where it is small.
        above = sinks.unsqueeze(-1) - tile.logsumexp(-1, keepdim=True)
        weights = weights * torch.exp(-F.softplus(above))
    return weights.masked_fill(unseen, 0.0) if may_be_empty else weights


def sinks(problem: Problem) -> Tensor | None:
    """Return the sinks, (h, 1), in the dtype of the scores."""
    return None if problem.sinks is None else problem.sinks[:, None].to(accumulated(problem.query.dtype))


def dropped(problem: Problem, weights: Tensor) -> Tensor:
    """Apply dropout to weights."""
    if problem.seed is None:
        return weights
    return weights * factors(problem.seed, problem.dropout_p, problem.sizes, problem.origin, weights.dtype)


def to_weights(grad: Tensor | None, value: Tensor | None, weights: Tensor) -> Tensor:
    """Compute Ȯ·Vᵀ, the gradient of the weights from that of an output, in their shape and dtype; zeros without one."""
    if grad is None or value is None:
        return torch.zeros_like(weights)
    return grouped_product(grad.to(weights.dtype), value.to(weights.dtype).transpose(-1, -2))


def grouped_product(left: Tensor, right: Tensor) -> Tensor:
    """Compute (b, h, n, m) @ (b, hk, m, d) without copies; each of the hk right heads serves h / hk left heads."""
    b, h, n, m = left.shape
    hk = right.shape[1]
    if h == hk:
        return left @ right
    return (left.reshape(b, hk, h // hk * n, m) @ right).reshape(b, h, n, right.shape[-1])


def pairwise(lowered: Pairwise, query: Tensor, key: Tensor) -> Tensor:
    """Compute scores in normal form of query (b, h, q, D) and key (b, hk, k, D): the sum over d, scale and softcap."""
    dtype, weight = accumulated(query.dtype), lowered.weight
    query, key = query.to(dtype), key.to(dtype)
    if lowered.phi == "mul":
        query = query * lowered.scale if weight is None else query * (weight * lowered.scale)
        tile = grouped_product(query, key.transpose(-1, -2))
    else:
        phi = PHIS[lowered.phi]
        pairs = phi.value(phi.combine(*facing(query, key)))
        tile = pairs.sum(-1) if weight is None else pairs @ weight.to(dtype)
        tile = tile.flatten(1, 2) * lowered.scale
    return capped(tile, lowered.softcap)


def facing(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return query and key with axes that broadcast to all pairs: (b, hk, groups, q, 1, D) and (b, hk, 1, 1, k, D)."""
    return unflatten(query, 1, key.shape[1], -1).unsqueeze(-2), key[:, :, None, None]
