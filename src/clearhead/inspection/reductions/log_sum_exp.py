"""The softmax's denominator."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from clearhead.inspection.reductions.base import Reduction
from clearhead.problem.partial import log_sum_exp, rows_of
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Found, Summary


@dataclass(frozen=True, repr=False)
class LogSumExp(Reduction):
    """The log-sum-exp of each query's scores: a weight is exp(score − this).

    >>> import torch, clearhead as ch
    >>> ch.weights(torch.zeros(2, 4), torch.zeros(3, 4)).reduce(ch.reductions.LogSumExp())
    tensor([1.0986, 1.0986])

    Formula: L_i = log Σ_j exp(s_ij) over the allowed keys, and the sink, if any. Gives (..., Lq); −∞ where no key is
    allowed. Differentiable. Cost: one pass over the allowed pairs, O(Lq) memory.
    """

    along = "queries"

    def summary(self, problem: Problem) -> Summary:
        return Summary(rows=True)

    def found(self, found: Found, problem: Problem) -> Tensor:
        return log_sum_exp(*rows_of(found))
