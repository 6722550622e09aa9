"""The entropy of each query's weights."""

from __future__ import annotations

from dataclasses import dataclass

from clearhead.inspection.reductions.base import Reduction, over_keys
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Summary


@dataclass(frozen=True, repr=False)
class Entropy(Reduction):
    """The entropy of each query's weights, in nats: 0 for one key, log(n) for n equal ones.

    >>> import torch, clearhead as ch
    >>> ch.weights(torch.zeros(2, 4), torch.zeros(3, 4)).entropy()
    tensor([1.0986, 1.0986])

    Formula: H_i = −Σ_j w_ij log w_ij = log Σ_j exp(s_ij) − Σ_j w_ij s_ij. Gives (..., Lq); 0 where nothing is allowed.
    With sinks, w are the weights of the keys divided by their sum, so the entropy does not depend on the sink, whose
    share is `SinkShare`. Differentiable. Cost: one pass over the allowed pairs, O(Lq) memory.
    Source: Shannon 1948, "A Mathematical Theory of Communication".
    """

    along = "queries"
    gives = "entropy"
    unit = "nats"

    def of(self, problem: Problem) -> Problem:
        return over_keys(problem)

    def summary(self, problem: Problem) -> Summary:
        return Summary(entropy=True)
