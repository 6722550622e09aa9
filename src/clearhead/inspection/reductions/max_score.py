"""The largest score of each query."""

from __future__ import annotations

from dataclasses import dataclass

from clearhead.inspection.reductions.base import Reduction
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Summary


@dataclass(frozen=True, repr=False)
class MaxScore(Reduction):
    """The largest score of each query, as the softmax meets it: scaled, capped, with bias, of an allowed key.

    >>> import torch, clearhead as ch
    >>> ch.weights(torch.ones(1, 1), torch.tensor([[1.0], [3.0], [2.0]])).reduce(ch.reductions.MaxScore())
    tensor([3.])

    Formula: m_i = max_j s_ij over the allowed keys; a sink does not count. Gives (..., Lq); −∞ where nothing is
    allowed. Differentiable: the gradient goes to the score of the first key that has it. It is worth watching in
    training: growing logits make a softmax that sees one key. Cost: one pass over the allowed pairs, O(Lq) memory.
    Source: Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters".
    """

    along = "queries"
    gives = "best"

    def summary(self, problem: Problem) -> Summary:
        return Summary(best=True)
