"""The gradients of one block, written out; the backward pass adds them up, block by block.

With S the scores, bias and mask included, P = exp(S − maximum − log_sum) the weights, D the factors of dropout, A = P ∘
D and O = A·V, and a dot for the gradient of the loss (Dao et al. 2022, "FlashAttention", appendix B):

    V̇ = Aᵀ·Ȯ        Ṗ = (Ȯ·Vᵀ) ∘ D        δ_i = Σ_j P_ij Ṗ_ij = Ȯ_i·O_i        Ṡ = P ∘ (Ṗ − δ)

The bias is added last, so its gradient is Ṡ. The derivative of the softcap is 1 − (t/c)², where t is the capped score.
Its argument is scale · Σ_d w_d φ(q_id, k_jd); the derivatives of φ are in the table of `scores/pair_functions.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.shapes import Sizes, part, unflatten
from clearhead.base.torch_state.tensor_kind import may_be_nan
from clearhead.engines.tiled import tiles
from clearhead.problem import regions
from clearhead.problem.packing import Operands, operands
from clearhead.problem.partial import Rows
from clearhead.problem.problem import Problem
from clearhead.problem.region import Region
from clearhead.problem.regions import cut, of_keys
from clearhead.problem.summary import Sent
from clearhead.scores.base import Pairwise
from clearhead.scores.pair_functions import PHIS


def gradients(problem: Problem, rows: Rows, grad: Tensor | None, wanted: tuple[bool, ...], sent: Sent) -> Operands:
    """Compute the gradients of a guarded problem's operands, without the sinks.

    `grad` is the gradient of the output.
    """
    sums = Operands(*map(tiles.new_sum, operands(problem), wanted))
    with torch.no_grad():
        for seen in find_seen(problem, regions.walk(problem, regions.BUDGET)):
            at = seen.sides[:3]
            own = None if grad is None else grad[at]
            _add(cut(problem, seen), seen, sums, Rows(*(row[at] for row in rows)), own, problem, sent)
    return sums._replace(sinks=None)


def find_seen(problem: Problem, every: Iterable[Region]) -> Iterator[Region]:
    """Yield the parts of these regions in which some query has an allowed key."""
    parts = (part for region in every for part in regions.parts_seen(problem, region))
    return (part for part in parts if part.keys.stop > part.keys.start)


def _add(
    problem: Problem, region: Region, sums: Operands, rows: Rows, grad: Tensor | None, whole: Problem, sent: Sent
) -> None:
    """Add the gradients of a part, which is this region of the whole, to the sums."""
    lowered = problem.lowered
    assert lowered is not None
    dtype = accumulated(problem.query.dtype)
    query, key = lowered.query.to(dtype), lowered.key.to(dtype)
    capped = tiles.pairwise(lowered, query, key)
    finished = tiles.finish(problem, capped)
    slope = slope_of(problem, finished, region, sums.value, rows, grad, whole.groups, sent)
    if sums.dense is not None:
        target = part(sums.dense, *region.sides)
        target.add_(slope.sum_to_size(target.shape))
    if sums.relative is not None:
        add_along(sums.relative, slope, region, whole.sizes)
    if lowered.softcap is not None:
        slope.mul_(1 - (capped / lowered.softcap).square_())
    _add_pairs(lowered, region, sums, slope, query, key, whole.groups)


def slope_of(
    problem: Problem,
    scores: Tensor,
    region: Region,
    to_value: Tensor | None,
    rows: Rows,
    grad: Tensor | None,
    groups: int,
    sent: Sent,
) -> Tensor:
    """Compute the gradient Ṡ of the finished scores of a part.

    The gradient of its values is added to `to_value`, (B, Hk, Lk, Ev), unless it is None.
    """
    dtype = scores.dtype
    maximum, log_sum, delta = (row.to(dtype).unsqueeze(-1) for row in rows)
    logs = (scores - maximum).sub_(log_sum)
    weights = logs.exp()  # P
    upstream = tiles.to_weights(grad, problem.value, weights)  # Ṗ, before the factors of dropout
    empty = tiles.may_be_empty(problem)
    if empty and may_be_nan(maximum + log_sum):  # exp(−∞) is 0 anyway, except in a row of NaN
        weights.masked_fill_(scores == -torch.inf, 0.0)
    add_sent(upstream, sent, region, logs)
    kept = weights
    if problem.seed is not None:
        factors = tiles.dropped(problem, torch.ones_like(weights))
        kept, upstream = weights * factors, upstream.mul_(factors)
    if to_value is not None and grad is not None:
        of_keys(to_value, groups, region).add_(_to_keys(kept, grad.to(dtype), problem.key.shape[1]))
    slope = upstream.sub_(delta).mul_(weights)  # Ṡ
    # a weight of 0 times NaN, or times ∞ from a huge value of other queries, would be NaN
    if empty and may_be_nan(slope.sum()):
        slope.masked_fill_(weights == 0, 0.0)
    if sent.best is not None and sent.best_key is not None:
        _add_at(slope, sent.best_key[region.sides[:3]].unsqueeze(-1), sent.best[region.sides[:3]].unsqueeze(-1), region)
    return slope


def add_sent(upstream: Tensor, sent: Sent, region: Region, logs: Tensor | None = None) -> None:
    """Add the gradients of statistics to the weights of a region; `logs` are the logarithms of these weights."""
    at, start = region.sides[:3], region.keys.start
    if sent.log_weight is not None and logs is not None:  # −∞ for a weight of 0, whose product is not read
        upstream.add_(logs.mul_(sent.log_weight[at].unsqueeze(-1)))
    places = torch.arange(start, region.keys.stop, device=upstream.device)
    if sent.distance is not None and sent.position is not None:
        gap = (part_of_rows(sent.position, region).unsqueeze(-1) - places).abs_()
        upstream.add_(gap.to(upstream.dtype) * sent.distance[at].unsqueeze(-1))
    if sent.maps:
        counted = upstream.new_zeros(())
        if sent.received is not None:
            counted = counted + sent.received[region.batch, region.heads, None, region.keys]
        if sent.mean is not None:
            tall, wide = sent.cell
            rows = torch.arange(region.queries.start, region.queries.stop, device=upstream.device) // tall
            counted = counted + sent.mean[region.batch, region.heads][:, :, rows[:, None], (places // wide)[None]]
        upstream.add_(counted if sent.factors is None else counted * part_of_rows(sent.factors, region).unsqueeze(-1))
    if sent.values is not None and sent.indices is not None:
        _add_at(upstream, sent.indices[at], sent.values[at], region)


def part_of_rows(tensor: Tensor, region: Region) -> Tensor:
    """Return a region's part of a (B or 1, H or 1, Lq) tensor."""
    return part(tensor, region.batch, region.heads, region.queries)


def _add_at(tile: Tensor, keys: Tensor, numbers: Tensor, region: Region) -> None:
    """Add numbers (b, h, q, n) to a tile at some keys of each row, if the region holds these keys."""
    places = keys - region.keys.start
    inside = (places >= 0) & (places < tile.shape[-1])
    tile.scatter_add_(-1, places.masked_fill(~inside, 0), numbers.to(tile.dtype).masked_fill(~inside, 0.0))


def _to_keys(tile: Tensor, rows: Tensor, key_heads: int) -> Tensor:
    """Compute tileᵀ · rows, (b, hk, k, d), summed over the query heads that share a key head."""
    b, h, q, k = tile.shape
    shape = (b, key_heads, h // key_heads * q)
    return tile.reshape(*shape, k).transpose(-1, -2) @ rows.reshape(*shape, rows.shape[-1])


def add_along(sums: Tensor, slope: Tensor, region: Region, sizes: Sizes) -> None:
    """Sum a tile along its diagonals, to one number for each distance."""
    rows, columns = slope.shape[-2:]
    # shift each row one place further right than the row below it, so that equal distances share a column
    skewed = torch.nn.functional.pad(slope.flip(-2), (0, rows)).flatten(-2)[..., : rows * (rows + columns - 1)]
    along = unflatten(skewed, -1, rows, rows + columns - 1).sum(-2)
    first = sizes.queries - region.queries.stop + region.keys.start
    target = part(sums, region.batch, region.heads)[..., first : first + rows + columns - 1]
    target.add_(along.sum_to_size(target.shape))


def _add_pairs(
    lowered: Pairwise, region: Region, sums: Operands, slope: Tensor, query: Tensor, key: Tensor, groups: int
) -> None:
    """Add the gradients of scale · Σ_d w_d φ(q_id, k_jd), from its own gradient `slope`, (b, h, q, k)."""
    weight = None if lowered.weight is None else lowered.weight.to(query.dtype)
    to_key = to_weight = None
    if lowered.phi == "mul":
        to_query = tiles.grouped_product(slope, key)
        if sums.key is not None:
            to_key = _to_keys(slope, query, key.shape[1])
        if sums.weight is not None:
            to_weight = (to_query * query).sum((0, 1, 2))
    else:
        phi = PHIS[lowered.phi]
        slope = unflatten(slope, 1, key.shape[1], -1).unsqueeze(-1)  # (b, hk, groups, q, k, 1)
        both = phi.combine(*tiles.facing(query, key))
        pairs = phi.value(both)
        if sums.weight is not None:
            to_weight = torch.tensordot(slope.flatten(), pairs.flatten(0, -2), 1)
        each = phi.derivative(both, pairs, both).mul_(slope)
        to_query, to_key = each.sum(-2).flatten(1, 2), phi.combine(0.0, each.sum((2, 3)))
    if weight is not None:
        to_query, to_key = to_query * weight, None if to_key is None else to_key * weight
    if sums.query is not None:
        sums.query[region.batch, region.heads, region.queries].add_(to_query, alpha=lowered.scale)
    if sums.key is not None and to_key is not None:
        of_keys(sums.key, groups, region).add_(to_key, alpha=lowered.scale)
    if sums.weight is not None and to_weight is not None:
        sums.weight.add_(to_weight, alpha=lowered.scale)
