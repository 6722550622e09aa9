"""The pairs that count: the pairs that a call allowed, of the queries that are looked at."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clearhead.masks.base import Residual, Spans, all_keys
from clearhead.problem.problem import Problem
from clearhead.problem.visible import Visible, visible
from clearhead.scores.base import Pairwise

TILE = 2**18  # the most pairs of a residual at once
ROWS = 256  # the most queries of a residual at once


def looked_at(words: Tensor | None, skipped: Tensor | None) -> Tensor | None:
    """The queries that are looked at, bool (B or 1, H or 1, Lq): words, (B, Lq), that are not skipped; None: all."""
    if words is None or skipped is None:
        return words.unsqueeze(1) if words is not None else None if skipped is None else ~skipped
    return words.unsqueeze(1) & ~skipped


def among(problem: Problem, queries: Tensor | None) -> Problem:
    """The problem in which only these queries, bool (B or 1, H or 1, Lq), see any key; None: all queries do. A bias of
    −∞ hides a pair as a mask does, and becomes a part of the mask."""
    sizes, spans, residual = problem.sizes, problem.spans, _finite(problem)
    problem = problem._replace(sizes=sizes._replace(leading=None), value=None)
    if queries is None and residual is None:
        return problem
    spans = all_keys(sizes) if spans is None else spans
    if queries is not None:
        spans = spans._replace(stop=torch.minimum(spans.stop, torch.where(queries, sizes.keys, 0)))
    if residual is not None:
        reads = () if problem.bias is None else problem.bias.reads
        spans = spans._replace(residual=_both(spans.residual, residual), reads=spans.reads + reads)
    return problem._replace(visible=visible(spans, sizes))


def _finite(problem: Problem) -> Residual | None:
    """The pairs that the bias does not hide, as a residual; None where it hides no pair."""
    bias, sizes = problem.bias, problem.sizes
    if bias is None or (bias.function is None and not any(bool((t == -torch.inf).any()) for t in bias.tensors)):
        return None

    def finite(batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
        return bias.tile(batch, heads, queries, keys, sizes) != -torch.inf

    return finite


def _both(one: Residual | None, other: Residual) -> Residual:
    return other if one is None else lambda *sides: one(*sides) & other(*sides)


def uniform(problem: Problem) -> Problem:
    """Uniform attention under the same mask: scores of 0. It has one head where the mask is the same for all heads."""
    sizes, spans = problem.sizes, problem.spans
    heads = 1
    if spans is not None and (spans.residual is not None or any(edge.shape[1] > 1 for edge in spans.edges())):
        heads = sizes.heads
    query, key = (
        torch.zeros(sizes.batch, heads, length, 1, dtype=problem.query.dtype, device=sizes.device)
        for length in (sizes.queries, sizes.keys)
    )
    sizes = sizes._replace(heads=heads)
    return Problem(Pairwise("mul", query, key), None, sizes, problem.visible)


def one_key(problem: Problem, keys: Tensor) -> Visible:
    """The problem's mask, narrowed so that each query sees one key at most. `keys`: int64 (B or 1, Lq), −1 for none."""
    spans, keys = problem.spans, keys.unsqueeze(1)
    sees = keys >= 0
    if spans is not None:
        start, stop = spans.intervals()
        sees = sees & ((keys.unsqueeze(-1) >= start) & (keys.unsqueeze(-1) < stop)).any(-1)
        sees = sees if spans.residual is None else sees & _rest(spans, problem, keys[:, 0])
    start = keys.clamp(min=0)
    return visible(Spans(start, start + sees.long()), problem.sizes)


def _rest(spans: Spans, problem: Problem, keys: Tensor) -> Tensor:
    """The residual at each query and its key, (B, H, Lq), read from small tiles around these pairs."""
    batch, heads, queries, _ = problem.sizes.shape
    found = torch.zeros(batch, heads, queries, dtype=torch.bool, device=keys.device)
    for some in [slice(0, batch)] if len(keys) == 1 else [slice(b, b + 1) for b in range(batch)]:
        rows = max(1, min(ROWS, math.isqrt(TILE // max(heads * (some.stop - some.start), 1))))
        own = keys[some.start if len(keys) > 1 else 0]
        host = own.cpu()
        for row in range(0, queries, rows):
            at, wanted = own[row : row + rows], host[row : row + rows]
            wanted = wanted[wanted >= 0]
            if not len(wanted):
                continue
            low, high = int(wanted.min()), int(wanted.max()) + 1
            sides = some, slice(0, heads), slice(row, row + len(at)), slice(low, high)
            tile = spans.rest(*sides).expand(some.stop - some.start, heads, len(at), high - low)
            place = (at - low).clamp(0, high - low - 1)[:, None].expand(*tile.shape[:3], 1)
            found[some, :, row : row + rows] = tile.gather(-1, place)[..., 0]
    return found
