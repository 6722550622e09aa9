"""How far each query looks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.base.positions import query_offset
from clearhead.inspection.reductions.base import Look, Reduction, per_query
from clearhead.problem.problem import Problem


@dataclass(frozen=True)
class MeanDistance(Reduction):
    """The mean distance from each query to the keys, by their weights, in positions.

    >>> import torch, clearhead as ch
    >>> ch.weights(torch.zeros(3, 4), torch.zeros(3, 4)).reduce(ch.MeanDistance())
    (tensor([1.0000, 0.6667, 1.0000]),)

    Formula: d_i = Σ_j w_ij |i + p − j|, where p is the position of query 0. Gives (..., Lq).
    Where Lq ≠ Lk, `align=` of `weights` says p; it is an error where it does not.
    Cost: one pass over the allowed pairs, O(Lq) memory.
    Source: Vig and Belinkov 2019, "Analyzing the Structure of Attention in a Transformer Language Model".
    """

    along = "queries"

    def begin(self, problem: Problem) -> tuple[Tensor, Tensor]:
        offset = query_offset(problem.sizes, "MeanDistance")
        own = torch.arange(problem.sizes.queries, device=problem.sizes.device).view(1, 1, -1) + offset
        return per_query(problem), own.expand(problem.sizes.batch, -1, -1)

    def look(self, buffers: tuple[Tensor, Tensor], look: Look) -> None:
        distance, own = buffers
        keys = torch.arange(look.region.keys.start, look.region.keys.stop, device=own.device)
        gap = (own[look.region.batch, :, look.region.queries, None] - keys).abs_().to(look.weights.dtype)
        distance[look.at] = (look.weights * gap).sum(-1)  # summed pairwise; einsum's running sum rounds more

    def end(self, buffers: tuple[Tensor, Tensor], problem: Problem) -> Tensor:
        return buffers[0]
