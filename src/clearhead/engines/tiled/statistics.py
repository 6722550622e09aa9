"""The statistics of `Found`, block by block, in PyTorch operations that are differentiable more than once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.torch_state.tensor_kind import is_writable
from clearhead.engines.tiled import tiles
from clearhead.engines.tiled.backward import part_of_rows
from clearhead.engines.tiled.blocks import checkpointed
from clearhead.engines.tiled.look import PEAK, Look, chunks
from clearhead.problem import regions
from clearhead.problem.problem import Problem
from clearhead.problem.region import Region
from clearhead.problem.regions import cut
from clearhead.problem.summary import KEYS, Found, Summary

Scores = Callable[[Problem], Tensor]


def in_blocks(problem: Problem, every: list[Region], scores: Scores, summary: Summary) -> Found:
    """Compute the statistics of a guarded problem over regions that cover it.

    `scores` computes the scores of a part.
    """
    if not every:
        nothing = _buffers(problem, summary)
        return _joined_to(problem, nothing) if problem.needs_grad else nothing

    def block(part: Problem, region: Region) -> Found:
        return _block(part, region, problem.sizes.keys, scores, summary)

    problem = tiles.widened(problem)
    # transforms and forward mode do not support checkpoints
    followed = problem.mode.operations_only
    again = problem.needs_grad and not followed and len(every) > 1
    compute = checkpointed(problem, every, block) if again else lambda region: block(cut(problem, region), region)
    if not problem.needs_grad and not followed:
        return _filled(problem, summary, ((region, compute(region)) for region in every))
    rows: dict[str, list[Tensor]] = {}
    sums: dict[str, dict[tuple[int, int], Tensor]] = {}  # by name, then by the first sequence and head
    places: dict[tuple[int, int], Region] = {}
    for region in every:
        for name, own in compute(region)._asdict().items():
            if not isinstance(own, Tensor):
                continue
            place = _place(name, region, problem, summary)
            if place is None:
                rows.setdefault(name, []).append(own)
                continue
            own = _padded(own, *place)
            before, at = sums.setdefault(name, {}), (region.batch.start, region.heads.start)
            places[at] = region
            combine = torch.maximum if name == "peak" else torch.add
            before[at] = combine(before[at], own) if at in before else own
    found: dict[str, Any] = {name: regions.assemble(parts, every) for name, parts in rows.items()}
    for name, of_heads in sums.items():
        found[name] = regions.assemble(list(of_heads.values()), [places[at] for at in of_heads])
    return _joined_to(problem, Found(**found))


def _filled(problem: Problem, summary: Summary, blocks: Iterator[tuple[Region, Found]]) -> Found:
    """Write the results of blocks to buffers at once, so that no new memory stays allocated between two blocks."""
    found = _buffers(problem, summary)
    for region, block in blocks:
        for name, own in block._asdict().items():
            buffer = getattr(found, name)
            if not isinstance(own, Tensor):
                continue
            place = _place(name, region, problem, summary)
            if place is None:
                buffer[region.sides[:3]] = own
                continue
            first, _ = place
            side = (slice(at, at + size) for at, size in zip(first, own.shape[2:], strict=True))
            part = buffer[(region.batch, region.heads, *side)]
            part.copy_(torch.maximum(part, own) if name == "peak" else part + own)
    return found


def _place(
    name: str, region: Region, problem: Problem, summary: Summary
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return where a region's sums over queries begin in the sums of the whole, and the sizes of the whole.

    None for results by row.
    """
    row, column = region.queries.start or 0, region.keys.start or 0  # None in compiled code
    if name == "received":
        return (column,), (problem.sizes.keys,)
    if name not in ("mean", "peak"):
        return None
    tall, wide = summary.mean or summary.peak or (1, 1)
    return (row // tall, column // wide), (-(-problem.sizes.queries // tall), -(-problem.sizes.keys // wide))


def _joined_to(problem: Problem, found: Found) -> Found:
    """Make results depend on the inputs if they do not, as in fully masked rows."""
    zero, constant = tiles.zero_of(problem), ("maximum", "scores", "peak")
    joined = {
        name: t + zero
        for name, t in found._asdict().items()
        if isinstance(t, Tensor) and t.is_floating_point() and name not in constant and not t.requires_grad
    }
    return found._replace(**joined)  # type: ignore[arg-type]


def looks(problem: Problem, every: list[Region], scores: Scores) -> Iterator[Look]:
    """Yield the blocks of a guarded problem."""
    for region in every:
        yield _look(cut(problem, region), region, scores)


def _look(part: Problem, region: Region, scores: Scores) -> Look:
    tile = scores(part)
    if part.lowered is None:  # copy: a user-defined score may hold the memory of its tile
        tile = tile.clone(memory_format=torch.contiguous_format)
    return Look(region, tile, tiles.may_be_empty(part), tiles.sinks(part))


def _block(part: Problem, region: Region, keys: int, scores: Scores, summary: Summary) -> Found:
    """Compute the statistics of one block: those of its queries, and its part of sums and maxima over queries.

    `keys`: the number of keys of the whole.
    """
    look = _look(part, region, scores)
    weights, blind = look.weights, look.blind
    found: dict[str, Tensor] = {}
    if summary.output:
        assert part.value is not None
        found["output"] = tiles.grouped_product(weights, part.value.to(weights.dtype))
    if summary.groups is not None:
        groups = summary.groups[region.batch if len(summary.groups) > 1 else slice(None), region.keys]
        found["groups"] = weights @ groups.to(weights.dtype).unsqueeze(1)
    if summary.rows:
        found["maximum"], found["log_sum"] = look.maximum, look.log_sum
    if summary.entropy:
        # replace −∞ by 0: a weight of 0 times −∞ would be NaN
        finite = look.scores.masked_fill(look.scores.detach() == -torch.inf, 0.0) if look.may_be_empty else look.scores
        expected = (look.shares * finite).sum(-1)
        found["entropy"] = (look.log_keys - expected).clamp(min=0.0).masked_fill(blind, 0.0)
    if summary.distance is not None:
        own = part_of_rows(summary.distance, region)
        places = torch.arange(weights.shape[-1], device=own.device) + look.start
        gap = (own.unsqueeze(-1) - places).abs().to(weights.dtype)
        found["distance"] = (weights * gap).sum(-1)  # pairwise summation; einsum's running sum rounds more
    if summary.best:
        found["best"], found["best_key"] = _best(look)
    if summary.top:
        found["values"], found["indices"], largest = _largest(look, summary.top, keys)
        if summary.scores:
            found["scores"] = largest
    if summary.received or summary.mean is not None:
        counted = weights
        if summary.factors is not None:
            counted = weights * part_of_rows(summary.factors, region).to(weights.dtype).unsqueeze(-1)
        if summary.received:
            found["received"] = counted.sum(2)
        if summary.mean is not None:
            found["mean"] = pooled(counted, look.first, summary.mean, torch.sum)
    if summary.peak is not None:
        found["peak"] = _peaks(look, summary.peak)
    return Found(**found)  # type: ignore[arg-type]


def _best(look: Look) -> tuple[Tensor, Tensor]:
    """Return the largest finished score of each row, and the first key with this score."""
    if not look.scores.shape[-1]:
        none = torch.full_like(look.blind, -1, dtype=torch.int64)
        return look.scores.new_full(look.blind.shape, -torch.inf), none
    key = look.scores.detach().argmax(-1, keepdim=True)
    chosen = look.scores.gather(-1, key).squeeze(-1).masked_fill(look.blind, -torch.inf)
    return chosen + look.top, (key.squeeze(-1) + look.start).masked_fill(look.blind, -1)


def _largest(look: Look, k: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k largest weights, their keys and their scores; equal weights are in the order of the keys."""
    count = min(k, look.weights.shape[-1])
    # fill up with weights of 0 if a block has fewer than k keys: the keys after it, then keys from the first on
    indices = ((torch.arange(k, device=look.blind.device) + look.start) % keys).expand(*look.blind.shape, k)
    if not count:
        weights = look.weights.new_zeros(*look.blind.shape, k)
        return weights, indices.contiguous(), torch.full_like(weights, -torch.inf)
    best = _tournament(look.scores.detach(), look.peaks(PEAK), count)
    values = F.pad(look.weights.gather(-1, best), (0, k - count))
    scores = look.scores.detach().gather(-1, best) + look.top.unsqueeze(-1)
    scores = F.pad(scores.masked_fill(look.blind.unsqueeze(-1), -torch.inf), (0, k - count), value=-torch.inf)
    return values, torch.cat([best + look.start, indices[..., count:]], -1), scores


def _tournament(scores: Tensor, peaks: Tensor, count: int) -> Tensor:
    """Return the places of the `count` largest scores, equal ones in order, by a tournament of chunks.

    Each round takes the first best chunk and the first best score in it, so a round reads one chunk, not the row. A
    taken score becomes −∞. A masked score is the least finite number, so that a used-up chunk is never mistaken for a
    masked chunk.
    """
    least = torch.finfo(scores.dtype).min
    scores, peaks = scores.clamp(min=least), peaks.clamp(min=least)
    places = torch.arange(PEAK, device=scores.device)
    put = Tensor.scatter_ if is_writable() else Tensor.scatter
    taken = []
    for _ in range(count):
        chunk = peaks.argmax(-1, keepdim=True)
        near = (chunk * PEAK + places).clamp(max=scores.shape[-1] - 1)
        local = scores.gather(-1, near)
        best = near.gather(-1, local.argmax(-1, keepdim=True))
        scores = put(scores, -1, best, -torch.inf)
        peaks = put(peaks, -1, chunk, local.masked_fill(near == best, -torch.inf).amax(-1, keepdim=True))
        taken.append(best)
    return torch.cat(taken, -1)


def pooled(weights: Tensor, first: tuple[int, int], cell: tuple[int, int], reduce: Any) -> Tensor:
    """Reduce weights over the cells that a block touches; `first`: the indices of its first query and key."""
    part = chunks(weights, cell[1], first[1], reduce)
    return chunks(part.transpose(-1, -2), cell[0], first[0], reduce).transpose(-1, -2)


def _peaks(look: Look, cell: tuple[int, int]) -> Tensor:
    tall, wide = cell
    if look.odd or look.start % wide or not look.weights.shape[-1]:
        return pooled(look.weights.detach(), look.first, cell, torch.amax)
    # the largest weight has the largest score, whose peaks may be cached already
    part = (look.peaks(wide) - look.log_total.detach().unsqueeze(-1)).exp()
    return chunks(part.transpose(-1, -2), tall, look.first[0], torch.amax).transpose(-1, -2)


def _padded(part: Tensor, first: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """Put a part at its place in the last dimensions of the whole, with zeros around it."""
    around: list[int] = []
    for dim in range(-1, -len(sizes) - 1, -1):
        around += [first[dim], sizes[dim] - first[dim] - part.shape[dim]]
    return F.pad(part, around)


def _buffers(problem: Problem, summary: Summary) -> Found:
    """Return zeros of the sizes of the statistics, as buffers, or as the results of a problem without rows."""
    dtype, device = accumulated(problem.query.dtype), problem.sizes.device
    found: dict[str, Any] = {
        name: torch.zeros(shape, dtype=torch.int64 if name in KEYS else dtype, device=device)
        for name, shape in summary.shapes(problem).items()
    }
    if summary.scores:
        found["scores"].fill_(-torch.inf)
    return Found(**found)
