"""The keys each query looks at most."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead._errors import ClearheadError
from clearhead._problem import Problem
from clearhead.inspection.base import Look, Reduction, per_query

CHUNK = 128


@dataclass(frozen=True)
class TopK(Reduction):
    """The k largest weights of each query, and their keys.

    >>> import torch, clearhead as ch
    >>> values, indices = ch.weights(torch.ones(1, 1), torch.tensor([[1.0], [3.0], [2.0]])).topk(2)
    >>> indices
    tensor([[1, 2]])

    Gives values and indices (int64), both (..., Lq, k), descending; equal ones in the order of the keys. Where a
    query may see fewer than k keys the rest have value 0, and the index of some other key.
    Raises a `ClearheadError` where k is not from 1 to Lk.
    """

    k: int

    def begin(self, problem: Problem) -> tuple[Tensor, Tensor, int]:
        if not 1 <= self.k <= problem.sizes.keys:
            raise ClearheadError(f"k is {self.k}, and there are {problem.sizes.keys} keys; pass 1 ≤ k ≤ Lk.")
        values = per_query(problem, self.k)
        return values, torch.zeros_like(values, dtype=torch.int64), problem.sizes.keys

    def look(self, buffers: tuple[Tensor, Tensor, int], look: Look) -> None:
        scores, width = look.scores, look.scores.shape[-1]
        values, indices, keys = buffers
        if width > CHUNK * (self.k + 1):
            # the k best keys are in the k chunks with the best peaks: an earlier chunk wins a tie, as a key does
            chunk = look.peaks(CHUNK).sort(dim=-1, descending=True, stable=True).indices[..., : self.k].sort(-1).values
            near = (chunk.unsqueeze(-1) * CHUNK + torch.arange(CHUNK, device=chunk.device)).flatten(-2)
            inside = near < width
            near = near.clamp_(max=width - 1)
            scores = scores.gather(-1, near).masked_fill_(~inside, -torch.inf)
        else:
            near = torch.arange(width, device=scores.device).expand(scores.shape)
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : self.k]
        best = near.gather(-1, best)  # (b, h, q, at most k)
        found = slice(0, best.shape[-1])
        values[(*look.at, found)] = look.weights.gather(-1, best)
        # in a block of fewer than k keys the rest, of weight 0, are the keys after it, and then from the first on
        indices[look.at] = (torch.arange(self.k, device=indices.device) + look.start) % keys
        indices[(*look.at, found)] = best + look.start

    def end(self, buffers: tuple[Tensor, Tensor, int], problem: Problem) -> tuple[Tensor, Tensor]:
        return buffers[0], buffers[1]
