"""Pairs with equal tokens, as intervals: a mask can express them when keys and queries are sorted by token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.masks._spans import Edges, all_keys, intersection, of_intervals
from clearhead.problem.problem import Problem
from clearhead.problem.visible import Visible, visible


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
