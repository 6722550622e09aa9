"""Blocks of rows of the weights, in differentiable PyTorch operations, for reductions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.base.shapes import unflatten
from clearhead.base.torch_state.tensor_kind import is_writable, may_be_nan
from clearhead.engines.tiled.tiles import flush_subnormal, unseen_apart
from clearhead.problem.partial import log_add
from clearhead.problem.region import Region

PEAK = 128  # the keys of a chunk in the search for the largest scores


class Look:
    """One block of rows with all their allowed keys, which each reduction reads.

    The block may overwrite `scores`. Autograd treats `top` and `maximum` as constants: no result depends on them.

    Args:
        region: The region of the block.
        scores: Its finished scores, (b, h, q, k).
        may_be_empty: Whether all scores of a row may be −∞.
        sinks: The sinks, (h, 1).

    Attributes:
        scores: The scores minus `top`, so that results keep their digits at any size; −∞ at masked pairs.
        top: The largest score of each row, (b, h, q).
        blind: Fully masked rows, bool (b, h, q).
        weights: The softmax of the scores, 0 in fully masked rows.
        shares: The softmax over the keys without the sinks; without sinks the same tensor as `weights`.
        maximum: As in `Partial`, (b, h, q).
        log_sum: As in `Partial`, (b, h, q).
        log_keys: log Σ_j exp(scores_ij), (b, h, q).
        log_total: The same with the sink.
    """

    def __init__(self, region: Region, scores: Tensor, may_be_empty: bool, sinks: Tensor | None = None) -> None:
        self.region = region
        self.start = region.keys.start or 0  # None in compiled code, whose only region is the whole matrix
        values = scores.detach()
        peaks = chunks(values, PEAK, 0, torch.amax) if scores.shape[-1] else values.new_zeros(*scores.shape[:-1], 0)
        top = peaks.amax(-1) if scores.shape[-1] else values.new_full(scores.shape[:-1], -torch.inf)
        self.blind = top == -torch.inf  # (b, h, q)
        # a score of +∞ makes the weights and every result of its row NaN
        self.top = top.masked_fill(self.blind, 0.0).masked_fill(top == torch.inf, torch.nan)
        self.may_be_empty = may_be_empty
        self.odd = may_be_empty and may_be_nan(self.top)
        unseen = values == -torch.inf if self.odd else None
        if may_be_empty and scores.requires_grad:
            scores = unseen_apart(scores)
        less = Tensor.sub_ if is_writable() else Tensor.sub
        self.scores = less(scores, self.top.unsqueeze(-1))  # (b, h, q, k)
        self._peaks = {PEAK: less(peaks, self.top.unsqueeze(-1))}
        above = self.scores.exp()
        total = above.sum(-1).masked_fill(self.blind, 1.0)
        self.shares = flush_subnormal(above / total.unsqueeze(-1))
        if unseen is not None:  # the weight of a masked pair is 0 even in a row of NaN
            self.shares = self.shares.masked_fill(unseen, 0.0)
        self.log_keys = total.log()
        if sinks is None:
            self.weights, self.log_total, maximum, log_sum = self.shares, self.log_keys, self.top, self.log_keys
        else:
            self.log_total = log_add(self.log_keys, sinks - self.top)
            self.weights = flush_subnormal(self.shares * (self.log_keys - self.log_total).exp().unsqueeze(-1))
            maximum = torch.maximum(self.top, sinks.detach().expand_as(self.top))
            log_sum = log_add(self.log_keys + (self.top - maximum), sinks - maximum)
            if unseen is not None:
                self.weights = self.weights.masked_fill(unseen, 0.0)
        self.maximum = maximum.masked_fill(self.blind, 0.0)
        self.log_sum = log_sum.masked_fill(self.blind, torch.inf)

    @property
    def at(self) -> tuple[slice, slice, slice]:
        """The index of this block's rows in a (B, H, Lq) result."""
        return self.region.batch, self.region.heads, self.region.queries

    @property
    def first(self) -> tuple[int, int]:
        """The indices of the block's first query and first key."""
        return self.region.queries.start or 0, self.start

    def peaks(self, chunk: int) -> Tensor:
        """Return the largest score of each `chunk` keys, counted from the block's first key, (b, h, q, chunks)."""
        if chunk not in self._peaks:
            self._peaks[chunk] = chunks(self.scores.detach(), chunk, 0, torch.amax)
        return self._peaks[chunk]


def chunks(tensor: Tensor, size: int, start: int, reduce: Any) -> Tensor:
    """Reduce the last dimension by chunks whose borders are multiples of `size` if it begins at `start`."""
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
