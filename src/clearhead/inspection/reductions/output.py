"""The attention output, in the same pass as other reductions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clearhead.engines.tiled.tiles import grouped_product
from clearhead.inspection.reductions.base import Look, Reduction, per_query
from clearhead.problem.problem import Problem, guard
from clearhead.problem.regions import of_keys
from clearhead.problem.summary import Found, Summary


@dataclass(frozen=True, eq=False)
class Output(Reduction):
    """The attention output for a value, computed in the same pass as other reductions.

    >>> import torch, clearhead as ch
    >>> query, key, value = torch.rand(3, 2, 50, 16)
    >>> out, entropy = ch.weights(query, key).reduce(ch.Output(value), ch.Entropy())
    >>> torch.allclose(out, ch.attention(query, key, value), atol=1e-6)
    True

    Formula: output_i = Σ_j w_ij value_j. `value`: (..., Lk, Ev), as for `attention`. Gives (..., Lq, Ev) of the
    weights' dtype, without gradients. At most one in a call of `reduce`. Cost: that of `attention`.
    """

    along = "queries"

    value: Any

    def begin(self, problem: Problem) -> tuple[Tensor, Tensor, int]:
        value = guard(problem).value
        assert value is not None
        return per_query(problem, value.shape[-1]), value, problem.groups

    def look(self, buffers: tuple[Tensor, Tensor, int], look: Look) -> None:
        output, value, groups = buffers
        part = of_keys(value, groups, look.region)
        output[look.at] = grouped_product(look.weights, part.to(look.weights.dtype))

    def end(self, buffers: tuple[Tensor, Tensor, int], problem: Problem) -> Tensor:
        return buffers[0]

    def summary(self, problem: Problem) -> Summary:
        return Summary(output=True)

    def found(self, found: Found, problem: Problem) -> Tensor | None:
        return found.output
