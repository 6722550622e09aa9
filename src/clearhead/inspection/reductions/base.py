"""What a reduction is, and the blocks of rows that it reads."""

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
    """One block of rows, with all the keys that they may see, which each reduction reads.

    `scores` have the largest of their row subtracted, so that results keep their digits at any size; −∞ where a
    pair is not allowed. `weights` are their softmax, 0 in rows of `blind` queries, which see nothing.
    With sinks, (h, 1), they sum to `mass`, (b, h, q); without, `mass` is None: they sum to 1.
    `largest` and `rest`, (b, h, q), sum to the log-sum-exp of keys and sink: m, the larger of the largest score and the
    sink, and the log of Σ_j exp(s_ij − m), the sink included.
    """

    def __init__(self, region: Region, scores: Tensor, may_be_empty: bool, sinks: Tensor | None = None) -> None:
        self.region = region
        self.start = region.keys.start
        self.may_be_empty = may_be_empty
        peaks = chunks(scores, PEAK, 0, torch.amax) if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 0)
        top = peaks.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
        self.blind = top == -torch.inf  # (b, h, q)
        # a score of +∞ makes the weights of its row NaN, and so every result for the row
        self.top = top.masked_fill(self.blind, 0.0).masked_fill_(top == torch.inf, torch.nan)
        odd = self.top.isnan()
        unseen = scores == -torch.inf if may_be_empty and bool(odd.any()) else None
        self.scores = scores.sub_(self.top.unsqueeze(-1))  # (b, h, q, k)
        self._peaks = {PEAK: peaks.sub_(self.top.unsqueeze(-1))}
        self.weights = scores.softmax(-1)
        if may_be_empty and bool(self.blind.any()):
            self.weights.masked_fill_(self.blind.unsqueeze(-1), 0.0)
        if unseen is not None:  # a masked pair has no weight in a row of NaN either
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
        """The scores, with the least finite number for −∞: a weight of 0 times a score is then 0."""
        return self.scores.clamp(min=torch.finfo(self.scores.dtype).min) if self.may_be_empty else self.scores

    @cached_property
    def log_sum(self) -> Tensor:
        """log Σ_j exp(scores_ij), (b, h, q); 0 where nothing is allowed. `__init__` adds the sink, if any."""
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

    `begin` makes its buffers, `look` adds one block's rows to them, `end` gives the result. Where an engine's fused
    pass can compute it, `summary` names the statistics, and `found` makes the result of them. `along`: what dimension 2
    of its results counts; None where it is neither.
    """

    along: ClassVar[Literal["queries", "keys"] | None] = None

    def check(self, problem: Problem) -> None:  # noqa: B027 - most apply to any weights
        """Raise where this cannot be computed for the weights of this problem."""

    @abstractmethod
    def begin(self, problem: Problem) -> Any:
        """The buffers, empty."""

    @abstractmethod
    def look(self, buffers: Any, look: Look) -> None:
        """Add one block to the buffers."""

    def end(self, buffers: Any, problem: Problem) -> Any:
        """The result from the buffers: tensors that begin with (B, H)."""
        return buffers

    def summary(self, problem: Problem) -> Summary | None:
        """The statistics that an engine's fused pass has to give; None where no such pass gives them."""
        return None

    def found(self, found: Found, problem: Problem) -> Any:
        """The result, from the statistics of that pass."""
        raise NotImplementedError


def per_query(problem: Problem, *extra: int) -> Tensor:
    """Zeros (B, H, Lq, ...), of the dtype that weights have."""
    sizes = problem.sizes
    dtype = accumulated(problem.query.dtype)
    return torch.zeros(sizes.batch, sizes.heads, sizes.queries, *extra, dtype=dtype, device=sizes.device)
