"""The mean distance from each query to its keys."""

from __future__ import annotations

from dataclasses import dataclass

from clearhead.inspection.reductions.base import Reduction, arange, over_keys
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Summary


@dataclass(frozen=True, repr=False)
class MeanDistance(Reduction):
    """The mean distance from each query to the keys, by their weights, in positions.

    >>> import torch, clearhead as ch
    >>> ch.weights(torch.zeros(3, 4), torch.zeros(3, 4)).reduce(ch.reductions.MeanDistance())
    tensor([1.0000, 0.6667, 1.0000])

    Formula: d_i = Σ_j w_ij |i + p − j|, where p is the position of query 0. Gives (..., Lq); 0 where nothing is
    allowed. With sinks, w are the weights of the keys divided by their sum. Differentiable.
    Where Lq ≠ Lk, `align=` of `weights` says p, and it is an error where `align=` is missing.
    Cost: one pass over the allowed pairs, O(Lq) memory.
    Source: Vig and Belinkov 2019, "Analyzing the Structure of Attention in a Transformer Language Model".
    """

    along = "queries"
    unit = "positions"
    gives = "distance"

    def check(self, problem: Problem) -> None:
        problem.query_offset("MeanDistance")

    def of(self, problem: Problem) -> Problem:
        return over_keys(problem)

    def summary(self, problem: Problem) -> Summary:
        own = arange(problem.sizes.queries, problem.sizes.device).view(1, 1, -1)
        return Summary(distance=own + problem.query_offset("MeanDistance"))
