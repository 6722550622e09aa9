"""Integers given for sequences, such as lengths and document ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import mask_forms, to_tensor
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.tracing import ensure
from clearhead.masks._read import own


def as_tensor(numbers: Any, name: str) -> Tensor:
    """Numbers, lists of them, arrays and tensors, as a tensor; an empty list as one of integers."""
    if isinstance(numbers, int | np.integer | list | tuple | range):
        try:
            numbers = torch.tensor(numbers, device="cpu")
        except (ValueError, TypeError) as ragged:
            raise ClearheadError(f"{name} is no array of integers: {ragged}.") from None
        numbers = numbers if numbers.numel() else numbers.long()
    if not isinstance(numbers, Tensor | np.ndarray):
        raise ClearheadError(f"{name} is {numbers!r:.40}; expected an integer, or integers: a list, array or tensor.")
    return to_tensor(numbers, name.split()[-1])


def check_lengths(lengths: Any, name: str) -> Tensor:
    """A copy as int64; raise for anything but integers, 0 or more, in at most two dimensions."""
    lens = as_tensor(lengths, name)
    if lens.is_floating_point() or lens.is_complex() or lens.dtype == torch.bool:
        raise ClearheadError(
            f"{name} has dtype {lens.dtype}, shape {tuple(lens.shape)}; expected integers, "
            f"for example {name.split()[-1]}.long(). Of a mask: {mask_forms('keep', lens)}"
        )
    if lens.ndim > 2:
        raise ShapeError(f"{name} has shape {tuple(lens.shape)}; expected (B,) or (B, Lq).")
    lens = own(lens.detach().long())
    if lens.numel():
        ensure(
            lens >= 0,
            lambda: ClearheadError(f"{name} holds {int(lens.min())}; a length is from 0 to the number of keys."),
            f"{name}: a length is 0 or more",
        )
    return lens
