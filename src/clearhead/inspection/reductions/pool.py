"""The weights as a small map."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.numbers import check_count
from clearhead.inspection.reductions.base import Queries, Reduction, check_queries, factors, of_queries
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Found, Summary


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
        check_queries(self.queries, problem, "Pool")
        if self.how == "max" and self.queries is not None and not isinstance(self.queries, slice):
            raise ClearheadError("Pool: a weight for each query goes with how='mean'; a maximum takes a slice.")

    def of(self, problem: Problem) -> Problem:
        return of_queries(problem, self.queries)

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
