"""How much of each query's weight goes to the pairs that a rule names."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.engines.tiled.look import Look
from clearhead.inspection.measures.base import Rule
from clearhead.inspection.reductions.base import Reduction
from clearhead.problem.problem import Problem


class PairMass(Reduction):
    """Σ_j w_ij over the keys that the rule names for query i, (B, H, Lq), by a look at each block of rows."""

    along = "queries"

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def begin(self, problem: Problem) -> Tensor:
        dtype = accumulated(problem.query.dtype)
        return torch.zeros(problem.sizes.shape[:3], dtype=dtype, device=problem.sizes.device)

    def look(self, buffers: Tensor, look: Look) -> None:
        meant = self.rule(look.region)
        buffers[look.at] = look.weights.masked_fill(~meant, 0.0).sum(-1)
