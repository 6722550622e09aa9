"""A model's own mask tensors as masks and biases, each converted once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.masks.base import Mask
from clearhead.masks.dense import DenseMask, intervals
from clearhead.masks.intervals import Intervals


@dataclass(frozen=True, eq=False)
class Recorded:
    """What a model's mask tensors say.

    `mask`: who may see whom. `bias`: what is added to the scores. `uniform`, bool (B or 1, H or 1, Lq, 1): queries
    that were left nothing by a finite float mask, to which the backend therefore gave the same weight for every key.
    """

    mask: Mask | None = None
    bias: Tensor | None = None
    uniform: Tensor | None = None


class MaskStore:
    """Converts mask tensors, and remembers them: models share one tensor among their layers.

    A bool tensor is a mask. A float tensor is added to the scores: entries at or below half of its dtype's least
    value mean "not allowed", and if all the others are 0 no bias is left.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[tuple[Tensor | None, ...], Recorded]] = {}

    def convert(self, mask: Tensor | None, bias: Tensor | None = None) -> Recorded:
        """`bias` is a position bias that the model passes beside its mask."""
        if mask is None and bias is None:
            return Recorded()
        key = (_identity(mask), _identity(bias))
        if key not in self._known:
            # the tensors are kept as long as the store, so that their addresses stay theirs
            self._known[key] = ((mask, bias), _convert(mask, bias))
        return self._known[key][1]


def _identity(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, version


@torch.no_grad()
def _convert(mask: Tensor | None, bias: Tensor | None) -> Recorded:
    added = None if bias is None else _four(bias.detach()).float()
    keep, uniform = None, None
    if mask is not None:
        mask = _four(mask.detach())
        keep = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        if mask.dtype != torch.bool:
            rest = mask.float().masked_fill(~keep, 0.0)
            added = rest if added is None else added + rest
        blind = ~keep.any(-1, keepdim=True)
        # SDPA gives 0 where a bool mask, or one of minus infinities, allows nothing. A finite least value is added
        # to every score alike, and with a position bias models turn a bool mask into that.
        least_is_finite = bias is not None if mask.dtype == torch.bool else bool((mask > -torch.inf).all())
        if least_is_finite and bool(blind.any()):
            uniform, keep = blind, keep | blind
            added = None if added is None else added.masked_fill(blind, 0.0)
    if added is not None and not bool(added.any()):
        added = None
    return Recorded(None if keep is None else _compact(keep), None if added is None else added.clone(), uniform)


def _four(mask: Tensor) -> Tensor:
    """(B or 1, H or 1, Lq or 1, Lk): PyTorch broadcasts masks from the right."""
    return mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape)) if mask.ndim < 4 else mask


def _compact(keep: Tensor) -> Mask | None:
    """None where all is allowed, spans where every row is an interval, else the mask itself."""
    if bool(keep.all()):
        return None
    start, stop, exact = intervals(keep, keep.shape[-1])
    if exact and keep.shape[-1] > 1:
        return Intervals(start, stop)
    return DenseMask(keep.clone())
