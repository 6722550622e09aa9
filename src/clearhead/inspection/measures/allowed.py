"""The pairs that count: those that a call allowed, of the queries that are looked at; one key for each query; and pairs
with equal tokens, which are intervals where keys and queries are sorted by token."""

from __future__ import annotations

import math
from operator import and_
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.base.user_functions.rules import Joined
from clearhead.masks._spans import Edges, Residual, Spans, all_keys, intersection, of_intervals
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
        both = residual if spans.residual is None else Joined(and_, spans.residual, residual)
        spans = spans._replace(residual=both, reads=spans.reads + reads)
    return problem._replace(visible=visible(spans, sizes))


def _finite(problem: Problem) -> Residual | None:
    """The pairs that the bias does not hide, as a residual; None where it hides no pair."""
    bias, sizes = problem.bias, problem.sizes
    if bias is None or (bias.function is None and not any(bool((t == -torch.inf).any()) for t in bias.tensors)):
        return None

    def finite(batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
        return bias.tile(batch, heads, queries, keys, sizes) != -torch.inf

    return finite


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


class Pairs(NamedTuple):
    """For each query the keys that have its token, int64 (B or 1, Lq) and (B or 1, Lk).

    `within`: the intervals of places in which these keys count, (B or 1, 1, Lq, n) as of `Spans.intervals`; None: all.
    """

    asked: Tensor
    held: Tensor
    within: Edges | None = None


class Grouped(NamedTuple):
    """The order of queries and of keys by token, int64 (B or 1, L), and the mask of the pairs in this order."""

    queries: Tensor
    keys: Tensor
    visible: Visible

    def of(self, problem: Problem) -> Problem:
        """The problem of the pairs alone, in this order. Its score must depend on query and key, not on places."""
        assert problem.bias is None and problem.poison is None and problem.seed is None
        scores = problem.scores._replace(query=_taken(problem.query, self.queries), key=_taken(problem.key, self.keys))
        return problem._replace(
            scores=scores, value=None, sizes=problem.sizes._replace(align=None), visible=self.visible
        )

    def back(self, found: Tensor) -> Tensor:
        """A result of the sorted problem, (B, H, Lq), in the original order of the queries."""
        return torch.empty_like(found).scatter_(-1, self.queries.unsqueeze(1).expand_as(found), found)


def grouped(problem: Problem, pairs: Pairs) -> Grouped | None:
    """The pairs that the mask allows, sorted; None where a query has too many intervals, or the mask a residual. Among
    the keys of one token, in the order of their places, the keys of an interval of places are neighbours again."""
    spans, length = problem.spans, problem.sizes.keys
    if spans is not None and spans.residual is not None:
        return None
    edges = (all_keys(problem.sizes) if spans is None else spans).intervals()
    edges = edges if pairs.within is None else intersection(edges, pairs.within, length)
    batch = max(len(pairs.asked), len(pairs.held))
    asked, held = (tokens.expand(batch, -1) for tokens in pairs[:2])
    numbers = torch.unique(torch.cat([asked, held], -1), return_inverse=True)[1]
    asked, held = numbers[:, : asked.shape[1]], numbers[:, asked.shape[1] :]
    by_query, by_key = asked.argsort(dim=-1, stable=True), held.argsort(dim=-1, stable=True)
    keys = held.gather(-1, by_key) * (length + 1) + by_key  # ascending: by token, then by place
    start, stop = (_found(edge, asked, by_query, keys) for edge in edges)
    spans = of_intervals(start, stop, length)
    return None if spans is None else Grouped(by_query, by_key, visible(spans, problem.sizes))


def _found(edge: Tensor, asked: Tensor, order: Tensor, keys: Tensor) -> Tensor:
    """The index after the last of the sorted keys that has a query's token and a place before the edge."""
    batch, heads, count = max(edge.shape[0], asked.shape[0]), edge.shape[1], edge.shape[-1]
    places = (asked[:, None, :, None] * (keys.shape[-1] + 1) + edge).expand(batch, heads, asked.shape[-1], count)
    places = places.gather(2, order[:, None, :, None].expand(places.shape))
    if len(keys) == 1:
        return torch.searchsorted(keys[0], places)
    return torch.searchsorted(keys, places.flatten(1)).view(places.shape)


def _taken(tensor: Tensor, order: Tensor) -> Tensor:
    """Vectors (B, H, L, E) in an order (B or 1, L)."""
    return tensor.gather(2, order[:, None, :, None].expand(tensor.shape))
