"""Whole numbers given for sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead._errors import ClearheadError, ShapeError
from clearhead._shapes import to_tensor
from clearhead._values import ensure


def check_lengths(lengths: Any, name: str) -> Tensor:
    """A copy as int64; raise for anything but integers, 0 or more, in at most two dimensions."""
    if isinstance(lengths, int | np.integer | list | tuple | range):
        try:
            lengths = torch.tensor(lengths)
        except (ValueError, TypeError) as ragged:
            raise ClearheadError(f"{name} is no array of integers: {ragged}.") from None
        lengths = lengths if lengths.numel() else lengths.long()
    lens = to_tensor(lengths, name.split()[-1])
    if lens.is_floating_point() or lens.is_complex() or lens.dtype == torch.bool:
        raise ClearheadError(
            f"{name} has dtype {lens.dtype}, shape {tuple(lens.shape)}; expected integers. "
            "For a 0/1 attention_mask pass Padding(keep); for a bool matrix, DenseMask(keep)."
        )
    if lens.ndim > 2:
        raise ShapeError(f"{name} has shape {tuple(lens.shape)}; expected (B,) or (B, Lq).")
    lens = lens.detach().long().clone()
    if lens.numel():
        ensure(
            lens >= 0,
            lambda: ClearheadError(f"{name} holds {int(lens.min())}; a length is from 0 to the number of keys."),
            f"{name}: a length is 0 or more",
        )
    return lens
