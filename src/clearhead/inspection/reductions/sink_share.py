"""The share of each query's softmax that goes to its sink."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.inspection.reductions.base import Reduction
from clearhead.problem.partial import rows_of
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Found, Summary


@dataclass(frozen=True, repr=False)
class SinkShare(Reduction):
    """The share of each query's softmax that goes to its head's sink: 1 less the weights of the keys.

    >>> import torch, clearhead as ch
    >>> query, key = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 3, 4)
    >>> ch.weights(query, key, sinks=torch.zeros(1)).reduce(ch.reductions.SinkShare())  # all equal
    tensor([[[0.2500, 0.2500]]])

    Formula: p_i = exp(sink − L_i) = 1 − Σ_j w_ij, L_i the log-sum-exp of keys and sink. Gives (..., Lq); 0 without
    sinks, and where nothing is allowed. Differentiable. Cost: one pass over the allowed pairs, O(Lq) memory.
    Source: Xiao et al. 2024, "Efficient Streaming Language Models with Attention Sinks".
    """

    along = "queries"

    def summary(self, problem: Problem) -> Summary:
        return Summary(rows=True)

    def found(self, found: Found, problem: Problem) -> Tensor:
        maximum, log_sum = rows_of(found)
        if problem.sinks is None:
            return torch.zeros_like(log_sum)
        share = (problem.sinks.to(maximum)[:, None] - maximum) - log_sum
        return share.masked_fill(log_sum == torch.inf, -torch.inf).exp()
