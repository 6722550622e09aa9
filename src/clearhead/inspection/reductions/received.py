"""How much each key is looked at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.inspection.reductions.base import Look, Reduction
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Found, Summary


@dataclass(frozen=True)
class Received(Reduction):
    """The attention each key receives: the sum of its weights over all queries.

    >>> import torch, clearhead as ch
    >>> ch.weights(torch.zeros(6, 4), torch.zeros(3, 4)).received()
    tensor([2., 2., 2.])

    Formula: r_j = Σ_i w_ij. Gives (..., Lk); without sinks they sum to the number of queries that see a key.
    Cost: one pass over the allowed pairs, O(Lk) memory.
    """

    along = "keys"

    def begin(self, problem: Problem) -> Tensor:
        sizes = problem.sizes
        dtype = accumulated(problem.query.dtype)
        return torch.zeros(sizes.batch, sizes.heads, sizes.keys, dtype=dtype, device=sizes.device)

    def look(self, buffers: Tensor, look: Look) -> None:
        batch, heads, _ = look.at
        buffers[batch, heads, look.region.keys] += look.weights.sum(2)

    def summary(self, problem: Problem) -> Summary:
        return Summary(received=True)

    def found(self, found: Found, problem: Problem) -> Tensor | None:
        return found.received
