"""Valid lengths."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead._errors import ClearheadError, ShapeError
from clearhead._shapes import Sizes, columns, to_tensor
from clearhead.masks.base import Mask, Spans


class Lengths(Mask):
    """Each sequence's first keys: as many as its valid length.

    >>> import torch, clearhead as ch
    >>> ch.Lengths([2, 4])
    Lengths([2, 4])
    batch 0
    ■ ■ · ·
    batch 1
    ■ ■ ■ ■

    Rule: query i of sequence b sees the keys j < valid_lens[b], or j < valid_lens[b, i].
    `valid_lens`: integers (B,) or (B, Lq), a list, array or tensor, from 0 (sees nothing) to Lk.
    Raises a `ClearheadError` for negative or fractional lengths and lengths above Lk.
    """

    def __init__(self, valid_lens: Any) -> None:
        self.valid_lens = check_lengths(valid_lens)
        bounds = torch.aminmax(self.valid_lens) if self.valid_lens.numel() else None
        low, self.longest = (int(bounds.min), int(bounds.max)) if bounds else (0, 0)
        if low < 0:
            raise ClearheadError(f"Lengths: valid_lens holds {low}; a length is from 0 to the number of keys.")

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls([(sizes.keys * (2 * b + 1)) // (2 * sizes.batch) for b in range(sizes.batch)])

    def signature(self) -> Hashable | None:
        if self.valid_lens.numel() > 64:
            return None
        return (type(self), tuple(self.valid_lens.shape), *self.valid_lens.flatten().tolist())

    def title(self) -> str:
        listed = self.valid_lens.tolist()
        if self.valid_lens.numel() > 8:
            return f"Lengths(<{'×'.join(map(str, self.valid_lens.shape))} lengths>)"
        return f"Lengths({listed})"

    def drawn(self) -> Sizes:
        queries = self.valid_lens.shape[1] if self.valid_lens.ndim == 2 else 1
        return Sizes(self.valid_lens.shape[0] if self.valid_lens.ndim else 1, 1, queries, self.longest)

    def lower(self, sizes: Sizes) -> Spans:
        lens = self.valid_lens.to(sizes.device)
        shape = tuple(lens.shape)
        if shape not in ((), (1,), (sizes.batch,), (sizes.batch, sizes.queries), (1, sizes.queries)):
            raise ShapeError(
                f"Lengths: valid_lens has shape {shape}; expected (B,) = ({sizes.batch},), or (B, Lq) = "
                f"({sizes.batch}, {sizes.queries}): one length a sequence, or one a query.\n"
                + columns({"scores": (*sizes.shown, sizes.queries, sizes.keys), "valid_lens": (*shape, "", "")[:4]})
            )
        if self.longest > sizes.keys:
            raise ClearheadError(
                f"Lengths: valid_lens, shape {shape}, holds {self.longest}, and there are {sizes.keys} keys.\n"
                "Lengths count keys, not queries or characters; were the keys truncated after they were counted?"
            )
        stop = lens.reshape(-1, 1, shape[1] if len(shape) == 2 else 1)
        return Spans(torch.zeros_like(stop[:1, :, :1]), stop)


def check_lengths(valid_lens: Any) -> Tensor:
    """A copy as int64; raise for anything but integers in one or two dimensions."""
    if isinstance(valid_lens, int | np.integer | list | tuple | range):
        try:
            valid_lens = np.asarray(valid_lens)
        except ValueError as ragged:
            raise ClearheadError(f"Lengths: valid_lens is no array of integers: {ragged}.") from None
        if valid_lens.size == 0:
            valid_lens = valid_lens.astype(np.int64)
    lens = to_tensor(valid_lens, "valid_lens")
    if lens.is_floating_point() or lens.is_complex() or lens.dtype == torch.bool:
        raise ClearheadError(
            f"Lengths: valid_lens has dtype {lens.dtype}, shape {tuple(lens.shape)}; expected integers. "
            "For a 0/1 attention_mask pass Padding(keep); for a bool matrix, DenseMask(keep)."
        )
    if lens.ndim > 2:
        raise ShapeError(f"Lengths: valid_lens has shape {tuple(lens.shape)}; expected (B,) or (B, Lq).")
    return lens.detach().long().clone()
