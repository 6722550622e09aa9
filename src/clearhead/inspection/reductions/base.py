"""What a reduction is, and the one streaming pass that serves any number of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.shapes import unflatten
from clearhead.problem.problem import Problem
from clearhead.problem.regions import Region
from clearhead.problem.summary import Found, Summary

PEAK = 128  # keys to a chunk where the largest scores are looked for


class Look:
    """One block of rows, whole along the keys they may see, looked at by each reduction.

    `scores` are less the largest of their row, so that what is computed from them keeps its digits however large they
    were; −∞ where a pair is not allowed. `weights` are their softmax, 0 in rows of `blind` queries, which see nothing.
    With sinks, (h, 1), they sum to `mass`, (b, h, q); without, `mass` is None: they sum to 1.
    `largest` and `rest`, (b, h, q), sum to the log-sum-exp, of keys and sink: the larger of the largest score and the
    sink, and the log of what is left.
    """

    def __init__(self, region: Region, scores: Tensor, may_be_empty: bool, sinks: Tensor | None = None) -> None:
        self.region = region
        self.start = region.keys.start
        self.may_be_empty = may_be_empty
        peaks = chunks(scores, PEAK, 0, torch.amax) if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 0)
        top = peaks.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
        self.blind = top == -torch.inf  # (b, h, q)
        # a score of +∞ makes the weights of its row NaN, and so all that is told of the row
        self.top = top.masked_fill(self.blind, 0.0).masked_fill_(top == torch.inf, torch.nan)
        odd = self.top.isnan()
        unseen = scores == -torch.inf if may_be_empty and bool(odd.any()) else None
        self.scores = scores.sub_(self.top.unsqueeze(-1))  # (b, h, q, k)
        self._peaks = {PEAK: peaks.sub_(self.top.unsqueeze(-1))}
        self.weights = scores.softmax(-1)
        if may_be_empty and bool(self.blind.any()):
            self.weights.masked_fill_(self.blind.unsqueeze(-1), 0.0)
        if unseen is not None:  # what is masked has no weight in a row of NaN either
            self.weights.masked_fill_(unseen, 0.0)
        self.mass: Tensor | None = None
        if sinks is None:
            self.largest, self.rest = self.top, self.log_sum
        else:
            over_keys = self.log_sum
            self.largest = torch.maximum(self.top, sinks.expand_as(self.top))
            self.rest = torch.logaddexp(over_keys + (self.top - self.largest), sinks - self.largest)
            self.log_sum = torch.logaddexp(over_keys, sinks - self.top)
            self.mass = (over_keys - self.log_sum).exp_()
            self.weights.mul_(self.mass.unsqueeze(-1))

    @property
    def at(self) -> tuple[slice, slice, slice]:
        """Where this block's rows are in a (B, H, Lq) result."""
        return self.region.batch, self.region.heads, self.region.queries

    @cached_property
    def finite_scores(self) -> Tensor:
        """The scores, with the least number there is for −∞: a weight of 0 times a score is then 0."""
        return self.scores.clamp(min=torch.finfo(self.scores.dtype).min) if self.may_be_empty else self.scores

    @cached_property
    def log_sum(self) -> Tensor:
        """log Σ_j exp(scores_ij), (b, h, q), from 0 to log Lk; 0 where nothing is allowed."""
        if not self.scores.shape[-1]:
            return self.top
        # minus the log of the largest weight, which is the most exact
        chunk = self.peaks(PEAK).argmax(-1, keepdim=True) * PEAK
        near = (chunk + torch.arange(PEAK, device=chunk.device)).clamp_(max=self.scores.shape[-1] - 1)
        best = near.gather(-1, self.scores.gather(-1, near).argmax(-1, keepdim=True))
        return -self.weights.gather(-1, best).squeeze(-1).masked_fill_(self.blind, 1.0).log_()

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
    if not parts:
        return tensor
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class Reduction(ABC):
    """A summary of the weights that one pass over their rows can build up.

    `begin` makes its buffers, `look` adds one block's rows to them, `end` gives the result. Where the engine's own pass
    finds the same, `summary` says what that is, and `found` gives the result. `along`: what dimension 2 of its results
    counts; None where it is neither.
    """

    along: ClassVar[Literal["queries", "keys"] | None] = None

    def check(self, problem: Problem) -> None:  # noqa: B027 - most can be asked of any weights
        """Raise where this cannot be asked of such weights."""

    @abstractmethod
    def begin(self, problem: Problem) -> Any:
        """The buffers, empty."""

    @abstractmethod
    def look(self, buffers: Any, look: Look) -> None:
        """Take one block in."""

    def end(self, buffers: Any, problem: Problem) -> Any:
        """The result from the buffers: tensors that begin with (B, H)."""
        return buffers

    def summary(self, problem: Problem) -> Summary | None:
        """What an engine's own pass would have to find for this; None where it cannot be had so."""
        return None

    def found(self, found: Found, problem: Problem) -> Any:
        """The result, from what that pass found."""
        raise NotImplementedError


def per_query(problem: Problem, *extra: int) -> Tensor:
    """Zeros (B, H, Lq, ...), of the dtype that weights have."""
    sizes = problem.sizes
    dtype = accumulated(problem.query.dtype)
    return torch.zeros(sizes.batch, sizes.heads, sizes.queries, *extra, dtype=dtype, device=sizes.device)
