"""The largest weights of each query."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.text import brief
from clearhead.inspection.reductions.base import Reduction
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Found, Summary


@dataclass(frozen=True, repr=False)
class TopK(Reduction[tuple[Tensor, Tensor]]):
    """The k largest weights of each query, and their keys.

    >>> import torch, clearhead as ch
    >>> values, indices = ch.weights(torch.ones(1, 1), torch.tensor([[1.0], [3.0], [2.0]])).topk(2)
    >>> indices
    tensor([[1, 2]])

    Gives values and indices (int64), both (..., Lq, k), descending; equal weights stand in the order of the keys.
    Where a query may see fewer than k keys the rest have value 0, and the index of some other key. Values are
    differentiable.
    Raises a `ClearheadError` where k is not from 1 to Lk.
    Cost: one pass over the allowed pairs, O(Lq·k) memory; for k above 64, k steps a query more.
    """

    along = "queries"

    k: int

    def check(self, problem: Problem) -> None:
        whole = isinstance(self.k, int | np.integer) and not isinstance(self.k, bool)
        if not whole or not 1 <= self.k <= problem.sizes.keys:
            raise ClearheadError(f"k is {brief(self.k)}, and there are {problem.sizes.keys} keys; pass 1 ≤ k ≤ Lk.")

    def summary(self, problem: Problem) -> Summary:
        return Summary(top=int(self.k))

    def found(self, found: Found, problem: Problem) -> tuple[Tensor, Tensor]:
        assert found.values is not None and found.indices is not None
        return found.values, found.indices
