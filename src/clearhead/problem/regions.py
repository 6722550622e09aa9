"""Parts of a problem: how the matrix is split into regions, and how a region becomes a problem."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from clearhead.base.shapes import Sizes
from clearhead.problem.problem import Problem
from clearhead.problem.region import EVERY, Region, bias_part, host_part, visible_part
from clearhead.problem.visible import intervals_of, rows_of, seen_by
from clearhead.scores.base import ByTile, Pairwise

ROWS = 256  # the most queries of a region if the mask depends on the query: larger regions skip fewer pairs
BUDGET = 2**21  # elements of a region's scores, or of the intermediate tensors that they need
TRACED = 2**24  # the budget in compiled code, which several regions would specialize to one size
LOOK = 2**20  # the budget of an inspection, whose several passes over a region should hit the cache


def cut(problem: Problem, region: Region) -> Problem:
    """Return a region of a problem as a problem itself, over views of the same tensors.

    Its softmax is over the keys of the region alone.
    """
    sides, sizes = region.sides, problem.sizes
    visible = problem.visible if region.masked else None
    compiled = problem.mode.compiled
    if all(_is_all(side, size, compiled) for side, size in zip(sides, sizes.shape, strict=True)):
        return problem if visible is problem.visible else problem._replace(visible=None)
    batch, heads, queries, keys = sides
    scores, poison = problem.scores, problem.poison
    places = [range(size)[side] for side, size in zip(sides, sizes.shape, strict=True)]
    b, h, q, k = map(len, places)
    origin = tuple(all_of[side] for all_of, side in zip(problem.origin or map(range, sizes.shape), sides, strict=True))
    if poison is not None:
        keys_poison = _key_heads(poison[1], problem.groups, region)[..., keys]
        poison = poison[0][batch, heads, queries], keys_poison
    scores = scores._replace(query=scores.query[batch, heads, queries], key=of_keys(scores.key, problem.groups, region))
    if isinstance(scores, ByTile) and scores.score.changed_by is not None:
        whole = scores.places or map(range, sizes.shape)
        scores = scores._replace(places=tuple(all_of[side] for all_of, side in zip(whole, sides, strict=True)))
    return problem._replace(
        scores=scores,
        value=None if problem.value is None else of_keys(problem.value, problem.groups, region),
        sizes=Sizes(b, h, q, k, sizes.device),
        visible=None if visible is None else visible_part(visible, region, sizes),
        bias=None if problem.bias is None else bias_part(problem.bias, region, sizes),
        sinks=None if problem.sinks is None else problem.sinks[heads],
        poison=poison,
        origin=origin,
        documents=None,
    )


def _is_all(side: slice, size: int, compiled: bool) -> bool:
    if side == EVERY:
        return True
    return not compiled and side.start in (None, 0) and side.stop == size and side.step in (None, 1)


def of_keys(tensor: Tensor, groups: int, region: Region) -> Tensor:
    """Return a region's part of a (B, Hk, Lk, ...) tensor: the key heads that its query heads use."""
    return _key_heads(tensor, groups, region)[:, :, region.keys]


def _key_heads(tensor: Tensor, groups: int, region: Region) -> Tensor:
    heads = range(*region.heads.indices(tensor.shape[1] * groups))
    first, last = (heads[0] // groups, heads[-1] // groups) if len(heads) else (0, -1)
    whole = heads.step == 1 and len(heads) == (last + 1 - first) * groups
    if whole or first == last:
        return tensor[region.batch, first : last + 1]
    return tensor[region.batch, [h // groups for h in heads]]


# ---------------------------------------------------------------------------------------------------------- the walk


def batch_groups(start: np.ndarray, stop: np.ndarray, batch: int) -> list[slice]:
    """Group consecutive sequences with equal spans, which can be computed together."""
    if start.shape[0] == 1:
        return [slice(0, batch)]
    differ = (start[1:] != start[:-1]).any((1, 2)) | (stop[1:] != stop[:-1]).any((1, 2))
    edges = [0, *(np.flatnonzero(differ) + 1).tolist(), batch]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def walk(problem: Problem, budget: int, numbers: int | None = None) -> Iterator[Region]:
    """Split the matrix into regions that need at most about `budget` elements of work memory.

    Each region has all keys of its queries. The order is by sequence, then by head, then by query, with the same cuts
    for all heads: see `assemble`.

    Args:
        problem: The problem.
        budget: The elements of work memory for one region.
        numbers: The elements for one score; by default `width(problem)`.
    """
    sizes, groups = problem.sizes, problem.groups
    if not sizes.batch or not sizes.heads or not sizes.queries:
        return
    if problem.mode.compiled and math.prod(sizes.shape) * width(problem) <= TRACED:
        # a slice with an end would specialize the compiled code to this size
        yield Region(masked=problem.visible is not None)
        return
    for batch, bands in _bands(problem):
        row = max(1, max(keys.stop - keys.start for _, keys, _ in bands) * (numbers or width(problem)))
        rows = max(1, min(max(q.stop - q.start for q, _, _ in bands), budget // row))
        head_step = max(groups, min(sizes.heads, budget // (row * rows)) // groups * groups)
        batch_step = max(1, budget // (row * rows * head_step))
        for b in range(batch.start, batch.stop, batch_step):
            for h in range(0, sizes.heads, head_step):
                some = slice(b, min(b + batch_step, batch.stop)), slice(h, min(h + head_step, sizes.heads))
                for queries, keys, masked in bands:
                    for q in range(queries.start, queries.stop, rows):
                        yield Region(*some, slice(q, min(q + rows, queries.stop)), keys, masked)


def _bands(problem: Problem) -> Iterator[tuple[slice, list[tuple[slice, slice, bool]]]]:
    """Yield groups of sequences with equal spans, each with its bands of queries.

    A band has the slice of its queries, the hull of their keys, and whether some pair of the two is masked.
    """
    sizes, visible = problem.sizes, problem.visible
    if visible is None or visible.edges is None:  # no mask, or a mask whose edges cannot be read
        yield slice(0, sizes.batch), [(slice(0, sizes.queries), slice(0, sizes.keys), visible is not None)]
        return
    narrowed = rows_of(visible, sizes)
    start, stop = visible.edges if narrowed is None else narrowed
    for batch in batch_groups(start, stop, sizes.batch):
        first, last = (edge[0 if start.shape[0] == 1 else batch.start] for edge in (start, stop))  # (H or 1, Lq or 1)
        varies = first.shape[-1] > 1
        step = max(sizes.queries, 1) if not varies else ROWS if narrowed is None else ROWS // 2
        bands = []
        for row in range(0, sizes.queries, step):
            queries = slice(row, min(row + step, sizes.queries))
            lows, highs = (edge[:, queries if varies else EVERY] for edge in (first, last))
            some = highs > lows
            low, high = (int(lows[some].min()), int(highs.max())) if some.any() else (0, 0)
            masked = not visible.spans.plain or bool((lows != low).any() or (highs != high).any())
            bands.append((queries, slice(low, high), masked))
        if bands:
            yield batch, bands


def parts_seen(problem: Problem, region: Region) -> list[Region]:
    """Split a region of whole rows along its keys into the parts that the intervals of its rows touch."""
    visible = problem.visible
    if visible is None or visible.spans.gaps is None or visible.edges is None:
        return [region]
    rows = (host_part(edge, region) for edge in intervals_of(visible))
    start, stop = (edge.reshape(-1, edge.shape[-1]) for edge in rows)
    some = stop > start
    touched = sorted(
        (int(start[some[:, i], i].min()), int(stop[some[:, i], i].max()))
        for i in range(start.shape[1])
        if some[:, i].any()
    )
    joined: list[list[int]] = []
    for low, high in touched:
        if joined and low <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], high)
        else:
            joined.append([low, high])
    return [region._replace(keys=slice(*edges)) for edges in joined or [[0, 0]]]


def assemble(parts: Sequence[Tensor], every: Sequence[Region]) -> Tensor:
    """Concatenate the regions' outputs (b, h, q, ...), in the order of `walk`, to one (B, H, Lq, ...)."""
    batches: dict[int, dict[int, list[Tensor]]] = {}
    for region, output in zip(every, parts, strict=True):
        batches.setdefault(region.batch.start, {}).setdefault(region.heads.start, []).append(output)
    return join([join([join(rows, 2) for rows in heads.values()], 1) for heads in batches.values()], 0)


def join(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate tensors; return a single tensor as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def width(problem: Problem) -> int:
    """Return the elements of work memory for one score: 1 for a matrix product, else one for each dimension."""
    scores = problem.scores
    if isinstance(scores, Pairwise):
        return 1 if scores.phi == "mul" else scores.key.shape[-1]
    return 1 if scores.score.product else max(scores.query.shape[-1], scores.key.shape[-1])


def of_heads(problem: Problem, batch: slice, heads: slice) -> Problem:
    """Return the problem of some sequences and heads, at the same positions."""
    align = problem.sizes.align
    if isinstance(align, Tensor) and align.numel() > 1 and problem.documents is None:
        align = align[batch]
    part = cut(problem, Region(batch, heads))
    return part._replace(sizes=part.sizes._replace(align=align), documents=problem.documents)


def of_sequence(problem: Problem, sequence: int, words: Tensor | None) -> Problem:
    """Return the problem of one sequence of the batch; queries that are False in `words`, (B, Lq), are fully masked."""
    some = slice(sequence, sequence + 1)
    return hide_from_padding(of_heads(problem, some, slice(None)), None if words is None else words[some])


def hide_from_padding(problem: Problem, words: Tensor | None) -> Problem:
    """Return the problem in which padding queries are fully masked.

    `words`, bool (B, Lq), is True for tokens; None means that no query is padding.
    """
    if words is None:
        return problem
    return problem._replace(visible=seen_by(words, problem.visible, problem.sizes))
