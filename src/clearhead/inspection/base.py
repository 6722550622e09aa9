"""What a reduction is, and the one streaming pass that serves any number of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from clearhead._problem import Problem
from clearhead._shapes import unflatten
from clearhead._tiles import Block, accumulated
from clearhead.engines.base import Engine

PEAK = 128  # keys to a chunk where the largest scores are looked for


class Look:
    """One block of rows, whole along the keys they may see, looked at by each reduction."""

    def __init__(self, block: Block, scores: Tensor, may_be_empty: bool) -> None:
        self.block = block
        self.start = block.keys.start
        # finite, so that a weight of 0 times a score is 0: what is not allowed keeps the least score there is
        self.least = torch.finfo(scores.dtype).min
        self.scores = scores.clamp_(min=self.least) if may_be_empty else scores  # (b, h, q, k)
        self._peaks: dict[int, Tensor] = {}
        top = self.peaks(PEAK).amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], self.least)
        self.blind = top <= self.least  # (b, h, q): queries that see nothing
        self.weights = scores.softmax(-1)
        if may_be_empty and bool(self.blind.any()):
            self.weights.masked_fill_(self.blind.unsqueeze(-1), 0.0)
        self._top = top

    @property
    def at(self) -> tuple[slice, slice, slice]:
        """Where this block's rows are in a (B, H, Lq) result."""
        return self.block.batch, self.block.heads, self.block.queries

    @cached_property
    def logsumexp(self) -> Tensor:
        """(b, h, q): the log of the softmax's denominator; −∞ where nothing is allowed."""
        if not self.scores.shape[-1]:
            return self._top.masked_fill(self.blind, -torch.inf)
        # log-sum-exp = a score minus the log of its weight, for the largest, whose weight is the most exact
        chunk = self.peaks(PEAK).argmax(-1, keepdim=True) * PEAK
        near = (chunk + torch.arange(PEAK, device=chunk.device)).clamp_(max=self.scores.shape[-1] - 1)
        best = near.gather(-1, self.scores.gather(-1, near).argmax(-1, keepdim=True))
        lse = self._top - self.weights.gather(-1, best).squeeze(-1).log()
        return lse.masked_fill(self.blind, -torch.inf)

    def peaks(self, chunk: int) -> Tensor:
        """The largest score of each `chunk` keys, counted from the block's first: (b, h, q, chunks)."""
        if chunk not in self._peaks:
            self._peaks[chunk] = chunks(self.scores, chunk, 0, torch.amax)
        return self._peaks[chunk]


def chunks(tensor: Tensor, size: int, start: int, reduce: Any) -> Tensor:
    """Reduce the last dimension by chunks whose borders are multiples of `size` when it begins at `start`."""
    first = min(-start % size, tensor.shape[-1])
    whole = (tensor.shape[-1] - first) // size
    parts = []
    if first:
        parts.append(reduce(tensor[..., :first], -1, keepdim=True))
    if whole:
        parts.append(reduce(unflatten(tensor[..., first : first + whole * size], -1, whole, size), -1))
    if first + whole * size < tensor.shape[-1]:
        parts.append(reduce(tensor[..., first + whole * size :], -1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class Reduction(ABC):
    """A summary of the weights that one pass over their rows can build up.

    `begin` makes its buffers, `look` adds one block's rows to them, `end` gives the result.
    """

    @abstractmethod
    def begin(self, problem: Problem) -> Any:
        """The buffers, empty."""

    @abstractmethod
    def look(self, buffers: Any, look: Look) -> None:
        """Take one block in."""

    def end(self, buffers: Any, problem: Problem) -> Any:
        """The result from the buffers: tensors that begin with (B, H)."""
        return buffers


def per_query(problem: Problem, *extra: int) -> Tensor:
    """Zeros (B, H, Lq, ...), of the dtype that weights have."""
    sizes = problem.sizes
    dtype = accumulated(problem.query.dtype)
    return torch.zeros(sizes.batch, sizes.heads, sizes.queries, *extra, dtype=dtype, device=sizes.device)


@torch.no_grad()
def stream(problem: Problem, engine: Engine, reductions: tuple[Reduction, ...]) -> tuple[Any, ...]:
    """All the reductions in one pass over the rows."""
    every = [reduction.begin(problem) for reduction in reductions]
    for look in looks(problem, engine):
        for reduction, buffers in zip(reductions, every, strict=True):
            reduction.look(buffers, look)
    return tuple(r.end(buffers, problem) for r, buffers in zip(reductions, every, strict=True))


def looks(problem: Problem, engine: Engine) -> Iterator[Look]:
    """The blocks of the matrix, in turn. A look may write to its own scores, which belong to nobody else."""
    for block, scores in engine.tiles(problem):
        yield Look(block, scores, block.masked or problem.bias is not None)
