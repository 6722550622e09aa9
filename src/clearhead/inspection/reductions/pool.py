"""The weights as a small map."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.errors import ClearheadError
from clearhead.base.numbers import check_count
from clearhead.inspection.reductions.base import Look, Reduction, chunks
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Found, Summary


@dataclass(frozen=True)
class Pool(Reduction):
    """The weights as a map of at most size × size cells, each the maximum or the mean of the weights it stands for.

    >>> import torch, clearhead as ch
    >>> ch.weights(torch.rand(1000, 4), torch.rand(1000, 4)).pool(10).shape
    torch.Size([10, 10])

    A cell is ⌈Lq / rows⌉ × ⌈Lk / columns⌉ weights, the last row and column perhaps fewer. The maximum loses no peak;
    a mean over all of a cell's pairs, allowed or not, keeps the sums. `size`: a number, or (rows, columns).
    Gives (..., rows, columns). Raises a `ClearheadError` for sizes below 1 or another `how`.
    Cost: one pass over the allowed pairs; memory of the map.
    """

    size: int | tuple[int, int]
    how: Literal["max", "mean"] = "max"

    def cell(self, problem: Problem) -> tuple[int, int]:
        """The queries and keys to a cell."""
        rows, columns = self.size if isinstance(self.size, tuple) else (self.size, self.size)
        return -(-problem.sizes.queries // rows) or 1, -(-problem.sizes.keys // columns) or 1

    def check(self, problem: Problem) -> None:
        sizes = self.size if isinstance(self.size, tuple) else (self.size, self.size)
        if len(sizes) != 2:
            raise ClearheadError(f"size is {self.size!r}; expected a number above 0, or a pair (rows, columns).")
        for size in sizes:
            check_count(size, 1, "a size of pool", most=math.inf)
        if not isinstance(self.how, str) or self.how not in ("max", "mean"):
            raise ClearheadError(f"how is {self.how!r}; expected 'max' or 'mean'.")

    def begin(self, problem: Problem) -> tuple[Tensor, tuple[int, int]]:
        rows, columns = self.cell(problem)
        shape = (-(-problem.sizes.queries // rows), -(-problem.sizes.keys // columns))
        dtype = accumulated(problem.query.dtype)
        lead = (problem.sizes.batch, problem.sizes.heads)
        return torch.zeros(*lead, *shape, dtype=dtype, device=problem.sizes.device), (rows, columns)

    def look(self, buffers: tuple[Tensor, tuple[int, int]], look: Look) -> None:
        cells, (rows, columns) = buffers
        if not look.weights.shape[-1]:
            return
        batch, heads, queries = look.at
        reduce = torch.sum if self.how == "mean" else torch.amax
        if self.how == "max" and look.start % columns == 0:
            # the largest weight has the largest score, and those peaks may be there already
            part = (look.peaks(columns) - look.log_sum.unsqueeze(-1)).exp_()
        else:
            part = chunks(look.weights, columns, look.start, reduce)
        part = chunks(part.transpose(-1, -2), rows, queries.start, reduce).transpose(-1, -2)
        top, left = queries.start // rows, look.start // columns
        target = cells[batch, heads, top : top + part.shape[-2], left : left + part.shape[-1]]
        target.copy_(target + part if self.how == "mean" else torch.maximum(target, part))

    def end(self, buffers: tuple[Tensor, tuple[int, int]], problem: Problem) -> Tensor:
        cells, step = buffers
        return self._mean(cells, step, problem) if self.how == "mean" else cells

    def _mean(self, cells: Tensor, step: tuple[int, int], problem: Problem) -> Tensor:
        """The sums over the cells, divided by their pairs."""
        totals = (problem.sizes.queries, problem.sizes.keys)
        height, width = (
            torch.tensor([min(each, total - i * each) for i in range(n)], device=cells.device)
            for total, each, n in zip(totals, step, cells.shape[2:], strict=True)
        )
        return cells / (height[:, None] * width[None, :])

    def summary(self, problem: Problem) -> Summary:
        return Summary(mean=self.cell(problem)) if self.how == "mean" else Summary(peak=self.cell(problem))

    def found(self, found: Found, problem: Problem) -> Tensor | None:
        return (
            found.peak
            if found.mean is None or self.how == "max"
            else self._mean(found.mean, self.cell(problem), problem)
        )
