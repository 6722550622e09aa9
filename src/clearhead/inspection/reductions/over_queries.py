"""Reductions that sum, or take the largest, over queries: over all, over a slice, or with a weight for each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import check_float, to_tensor
from clearhead.base.errors import ClearheadError, ShapeError, columns
from clearhead.base.numbers import check_count
from clearhead.base.shapes import Sizes, broadcasts, placed
from clearhead.inspection.reductions.base import Queries, Reduction
from clearhead.problem.problem import Problem
from clearhead.problem.region import Region
from clearhead.problem.regions import cut
from clearhead.problem.summary import Found, Summary


def of_queries(problem: Problem, queries: Queries, who: str) -> Problem:
    """The problem of some queries, where `queries` is a slice. Raises where the slice does not go forward."""
    if not isinstance(queries, slice):
        return problem
    parts = (queries.start, queries.stop, queries.step)
    whole = all(isinstance(p, int | np.integer | None) and not isinstance(p, bool) for p in parts)
    if not whole or (queries.step is not None and queries.step < 1):
        raise ClearheadError(f"{who}: queries is {queries}; expected a slice of whole numbers that goes forward.")
    every = range(problem.sizes.queries)
    if every[queries] == every:
        return problem
    return cut(problem._replace(value=None), Region(queries=queries))


def factors(queries: Queries, sizes: Sizes, who: str) -> Tensor | None:
    """A weight for each query, (B or 1, H or 1, Lq); None where there are none."""
    if queries is None or isinstance(queries, slice):
        return None
    given: Tensor = to_tensor(queries, "queries")
    check_float(given, "queries")
    shown = (*sizes.shown, sizes.queries)
    fits = given.ndim and given.ndim <= len(shown) and given.shape[-1] == sizes.queries
    if not fits or not broadcasts(given.shape, shown):
        raise ShapeError(
            f"{who}: queries has shape {tuple(given.shape)}; expected a slice, or a weight for each query, which "
            f"broadcasts to {shown}.\n" + columns({"queries": shown, "weights": tuple(given.shape)})
        )
    given = placed(given.detach(), sizes.device, f"{who}: queries").clone()  # for the backward pass
    if given.ndim == 1:
        return given.view(1, 1, -1)
    return given.expand(shown).reshape(*sizes.shape[:3])


@dataclass(frozen=True, eq=False, repr=False)
class Received(Reduction):
    """The attention that each key receives: the sum of its weights over all queries, or over some.

    >>> import torch, clearhead as ch
    >>> w = ch.weights(torch.zeros(6, 4), torch.zeros(3, 4))
    >>> w.received()
    tensor([2., 2., 2.])
    >>> w.reduce(ch.reductions.Received(queries=slice(-3, None)))  # by the last three queries, as a cache chooses keys
    tensor([1., 1., 1.])

    Formula: r_j = Σ_i u_i w_ij, u_i = 1 where `queries` is None. `queries`: a slice, or a weight u for each query, a
    tensor that broadcasts to (..., Lq) and has no gradient. Gives (..., Lk); without sinks they sum to the number of
    queries that see a key, or to Σ u. Differentiable. Raises a `ShapeError` or `ClearheadError` for other `queries`.
    Cost: one pass over the allowed pairs (of a slice, over its rows), O(Lk) memory; gradients take one pass more.
    Source: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle"; the last queries alone: Li et al. 2024, "SnapKV".
    """

    along = "keys"
    gives = "received"

    queries: Queries = None

    def of(self, problem: Problem) -> Problem:
        return of_queries(problem, self.queries, "Received")

    def summary(self, problem: Problem) -> Summary:
        return Summary(received=True, factors=factors(self.queries, problem.sizes, "Received"))


@dataclass(frozen=True, eq=False, repr=False)
class Pool(Reduction):
    """The weights as a map of at most size × size cells, each the maximum or the mean of its weights.

    >>> import torch, clearhead as ch
    >>> ch.weights(torch.rand(1000, 4), torch.rand(1000, 4)).pool(10).shape
    torch.Size([10, 10])

    A cell is ⌈Lq / rows⌉ × ⌈Lk / columns⌉ weights; the last row and column may have fewer. The maximum loses no peak;
    a mean over all of a cell's pairs, allowed or not, keeps the sums. `size`: a number, or (rows, columns).
    `queries`: a slice of the queries, which the map then shows, or, for means, a factor for the weights of each query,
    a tensor that broadcasts to (..., Lq).
    Gives (..., rows, columns). Means are differentiable, maxima are not.
    Raises a `ClearheadError` for sizes below 1 or another `how`, a `ShapeError` for other `queries`.
    Cost: one pass over the allowed pairs; memory of the map. Gradients of means take one pass more.
    """

    size: int | tuple[int, int]
    how: Literal["max", "mean"] = "max"
    queries: Queries = None

    def cell(self, problem: Problem) -> tuple[int, int]:
        """The numbers of queries and keys in a cell."""
        rows, columns = self.size if isinstance(self.size, tuple) else (self.size, self.size)
        return -(-problem.sizes.queries // rows) or 1, -(-problem.sizes.keys // columns) or 1

    def check(self, problem: Problem) -> None:
        sizes = self.size if isinstance(self.size, tuple) else (self.size, self.size)
        if len(sizes) != 2:
            raise ClearheadError(f"size is {self.size!r}; expected a number above 0, or a pair (rows, columns).")
        for size in sizes:
            check_count(size, 1, "a size of pool", most=math.inf)
        if not isinstance(self.how, str) or self.how not in ("max", "mean"):
            raise ClearheadError(f"how is {self.how!r}; expected 'max' or 'mean'.")
        if self.how == "max" and self.queries is not None and not isinstance(self.queries, slice):
            raise ClearheadError("Pool: a weight for each query goes with how='mean'; a maximum takes a slice.")

    def of(self, problem: Problem) -> Problem:
        return of_queries(problem, self.queries, "Pool")

    def summary(self, problem: Problem) -> Summary:
        if self.how == "max":
            return Summary(peak=self.cell(problem))
        return Summary(mean=self.cell(problem), factors=factors(self.queries, problem.sizes, "Pool"))

    def found(self, found: Found, problem: Problem) -> Tensor:
        if self.how == "max" or found.mean is None:
            assert found.peak is not None
            return found.peak
        totals = (problem.sizes.queries, problem.sizes.keys)
        height, width = (
            torch.tensor([min(each, total - i * each) for i in range(n)], device=found.mean.device)
            for total, each, n in zip(totals, self.cell(problem), found.mean.shape[2:], strict=True)
        )
        return found.mean / (height[:, None] * width[None, :])
