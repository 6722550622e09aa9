"""The keys each query looks at most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.inspection.reductions.base import PEAK, Look, Reduction, per_query
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Found, Summary

FEW = 64  # more are found by a tournament: the fused pass keeps the largest in a list, in order


@dataclass(frozen=True)
class TopK(Reduction):
    """The k largest weights of each query, and their keys.

    >>> import torch, clearhead as ch
    >>> values, indices = ch.weights(torch.ones(1, 1), torch.tensor([[1.0], [3.0], [2.0]])).topk(2)
    >>> indices
    tensor([[1, 2]])

    Gives values and indices (int64), both (..., Lq, k), descending; equal ones in the order of the keys. Where a
    query may see fewer than k keys the rest have value 0, and the index of some other key.
    Raises a `ClearheadError` where k is not from 1 to Lk. Cost: one pass over the allowed
    pairs, O(Lq·k) memory; for k above 64, k steps a query more.
    """

    along = "queries"

    k: int

    def check(self, problem: Problem) -> None:
        whole = isinstance(self.k, int | np.integer) and not isinstance(self.k, bool)
        if not whole or not 1 <= self.k <= problem.sizes.keys:
            raise ClearheadError(f"k is {self.k!r}, and there are {problem.sizes.keys} keys; pass 1 ≤ k ≤ Lk.")

    def begin(self, problem: Problem) -> tuple[Tensor, Tensor, int]:
        values = per_query(problem, int(self.k))
        return values, torch.zeros_like(values, dtype=torch.int64), problem.sizes.keys

    def look(self, buffers: tuple[Tensor, Tensor, int], look: Look) -> None:
        values, indices, keys = buffers
        count = min(self.k, look.scores.shape[-1])
        # in a block of fewer than k keys the rest, of weight 0, are the keys after it, and then from the first on
        indices[look.at] = (torch.arange(self.k, device=indices.device) + look.start) % keys
        if count:
            best = largest(look.scores, look.peaks(PEAK), count)
            values[(*look.at, slice(0, count))] = look.weights.gather(-1, best)
            indices[(*look.at, slice(0, count))] = best + look.start

    def end(self, buffers: tuple[Tensor, Tensor, int], problem: Problem) -> tuple[Tensor, Tensor]:
        return buffers[0], buffers[1]

    def summary(self, problem: Problem) -> Summary | None:
        return Summary(top=int(self.k)) if self.k <= FEW else None

    def found(self, found: Found, problem: Problem) -> tuple[Tensor | None, Tensor | None]:
        return found.values, found.indices


def largest(scores: Tensor, peaks: Tensor, count: int) -> Tensor:
    """The places of the `count` largest scores, equal ones in order, by a tournament of chunks.

    Each round takes the first best chunk and the first best score in it, so a round reads one chunk, not the row.
    What has been taken becomes −∞; what is not allowed is the least number, so that a chunk that is used up is never
    taken for one that is masked.
    """
    least = torch.finfo(scores.dtype).min
    scores, peaks = scores.clamp(min=least), peaks.clamp(min=least)
    places = torch.arange(PEAK, device=scores.device)
    taken = []
    for _ in range(count):
        chunk = peaks.argmax(-1, keepdim=True)
        near = (chunk * PEAK + places).clamp_(max=scores.shape[-1] - 1)
        local = scores.gather(-1, near)
        best = near.gather(-1, local.argmax(-1, keepdim=True))
        scores.scatter_(-1, best, -torch.inf)
        peaks.scatter_(-1, chunk, local.masked_fill_(near == best, -torch.inf).amax(-1, keepdim=True))
        taken.append(best)
    return torch.cat(taken, -1)
