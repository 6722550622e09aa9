"""The softmax's denominator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.inspection.reductions.base import Look, Reduction, per_query
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Found, Summary


@dataclass(frozen=True)
class LogSumExp(Reduction):
    """log Σ_j exp(s_ij) over allowed keys and sink, (..., Lq): a weight is exp(score − this). −∞ where no key is."""

    along = "queries"

    def begin(self, problem: Problem) -> Tensor:
        return per_query(problem).fill_(-torch.inf)

    def look(self, buffers: Tensor, look: Look) -> None:
        buffers[look.at] = (look.largest + look.rest).masked_fill_(look.blind, -torch.inf)

    def summary(self, problem: Problem) -> Summary:
        return Summary(normaliser=True)

    def found(self, found: Found, problem: Problem) -> Tensor:
        assert found.largest is not None and found.rest is not None
        return (found.largest + found.rest).masked_fill_(found.largest == torch.inf, -torch.inf)


@dataclass(frozen=True)
class Normaliser(Reduction):
    """The log-sum-exp in two parts, each (..., Lq): m, the largest score or sink, and log Σ_j exp(s_ij − m).

    A weight is exp((score − largest) − rest): this keeps its digits where the scores are large. The largest is +∞ where
    nothing is allowed, so that the weights are 0.
    """

    along = "queries"

    def begin(self, problem: Problem) -> tuple[Tensor, Tensor]:
        return per_query(problem).fill_(torch.inf), per_query(problem)

    def look(self, buffers: tuple[Tensor, Tensor], look: Look) -> None:
        largest, rest = buffers
        largest[look.at] = look.largest.masked_fill(look.blind, torch.inf)
        rest[look.at] = look.rest

    def summary(self, problem: Problem) -> Summary:
        return Summary(normaliser=True)

    def found(self, found: Found, problem: Problem) -> tuple[Tensor | None, Tensor | None]:
        return found.largest, found.rest
