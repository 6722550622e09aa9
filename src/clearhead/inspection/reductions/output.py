"""The attention output, in the same pass as other reductions."""

from __future__ import annotations

from dataclasses import dataclass

from clearhead.base.arrays import Array
from clearhead.inspection.reductions.base import Reduction
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Summary


@dataclass(frozen=True, eq=False, repr=False)
class Output(Reduction):
    """The attention output for a value, computed in the same pass as other reductions.

    >>> import torch, clearhead as ch
    >>> query, key, value = torch.rand(3, 2, 50, 16)
    >>> out, entropy = ch.weights(query, key).reduce(ch.reductions.Output(value), ch.reductions.Entropy())
    >>> torch.allclose(out, ch.attention(query, key, value), atol=1e-6)
    True

    Formula: output_i = Σ_j w_ij value_j. `value`: (..., Lk, Ev), as for `attention`. Gives (..., Lq, Ev) of the
    weights' dtype. Differentiable. A call of `reduce` takes at most one. Cost: that of `attention`.
    """

    along = "queries"
    gives = "output"

    value: Array

    def summary(self, problem: Problem) -> Summary:
        return Summary(output=True)
