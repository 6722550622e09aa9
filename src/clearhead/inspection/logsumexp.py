"""The softmax's denominator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead._problem import Problem
from clearhead.inspection.base import Look, Reduction, per_query


@dataclass(frozen=True)
class LogSumExp(Reduction):
    """log Σ_j exp(s_ij) over the allowed keys, (..., Lq): a weight is exp(score − this). −∞ where none is allowed."""

    def begin(self, problem: Problem) -> Tensor:
        return per_query(problem).fill_(-torch.inf)

    def look(self, buffers: Tensor, look: Look) -> None:
        buffers[look.at] = look.logsumexp
