"""The attention that each key receives."""

from __future__ import annotations

from dataclasses import dataclass

from clearhead.inspection.reductions.base import Queries, Reduction, check_queries, factors, of_queries
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Summary


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

    def check(self, problem: Problem) -> None:
        check_queries(self.queries, problem, "Received")

    def of(self, problem: Problem) -> Problem:
        return of_queries(problem, self.queries)

    def summary(self, problem: Problem) -> Summary:
        return Summary(received=True, factors=factors(self.queries, problem.sizes, "Received"))
