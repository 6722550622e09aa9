"""The arguments `mask` and `valid_lens` of functions and modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import is_whole, refuse_additive, shown, to_tensor
from clearhead.base.errors import ClearheadError
from clearhead.base.output.text import brief
from clearhead.biases.base import Bias
from clearhead.biases.dense import DenseBias
from clearhead.masks._read import as_tensor
from clearhead.masks.base import Mask
from clearhead.masks.dense import DenseMask
from clearhead.masks.lengths import Lengths
from clearhead.problem.nested import is_nested


def apply_valid_lens(mask: Any, valid_lens: Any, bias: Any) -> tuple[Any, Any]:
    """Return the mask and the bias of a call of `attention`, which checks a mask without lengths itself."""
    return (mask, bias) if valid_lens is None else with_lengths(mask, valid_lens, bias)


def with_lengths(mask: Any, valid_lens: Any, bias: Any = None) -> tuple[Any, Any]:
    """Join the mask with the lengths; return it with the bias, as `attention` takes them.

    A float mask beside lengths becomes a part of the bias, and the lengths decide which pairs are masked.
    """
    check_mask(mask)
    if valid_lens is None:
        return mask, bias
    lengths = _as_lengths(valid_lens)
    if mask is None:
        return lengths, bias
    if isinstance(mask, Mask):
        return mask & lengths, bias
    if not isinstance(mask, Tensor | np.ndarray):
        return mask, bias  # attention() raises the error for this type
    if not to_tensor(mask, "mask").is_floating_point():
        return DenseMask(mask) & lengths, bias
    if isinstance(bias, Tensor | np.ndarray):
        bias = DenseBias(bias)
    if bias is None:
        return lengths, DenseBias(mask)
    return lengths, DenseBias(mask) + bias if isinstance(bias, Bias) else bias


def check_mask(mask: Any) -> None:
    """Raise for integers, which may be lengths or a tokenizer's mask."""
    if mask is None:
        return
    if isinstance(mask, list | tuple | range) or is_nested(mask):
        raise ClearheadError(
            f"mask is {brief(mask)}; expected a Mask, such as Causal(), a bool tensor (True = may attend), or a float "
            "tensor (added to the scores).\nPass numbers of allowed keys as valid_lens=..., or mask=Lengths(...)."
        )
    if isinstance(mask, Tensor | np.ndarray) and is_whole(mask):
        refuse_additive(mask, "mask")
        raise ClearheadError(
            f"mask has dtype {mask.dtype}, shape {tuple(mask.shape)}; expected bool, True = may attend, or float "
            "(added to the scores).\nPass lengths as valid_lens=mask, or mask=Lengths(mask); a tokenizer's 0/1 "
            "attention_mask as mask=Padding(mask); another 0/1 matrix as mask=DenseMask(mask.bool())."
        )


def _as_lengths(valid_lens: Any) -> Lengths:
    """Return integers as `Lengths`; raise for a mask, with the argument that takes it."""
    numbers = None if isinstance(valid_lens, Mask) else as_tensor(valid_lens, "valid_lens")
    if numbers is None or numbers.dtype == torch.bool or not numbers.ndim:
        raise ClearheadError(
            f"valid_lens is {valid_lens.title() if numbers is None else shown(numbers)}; expected numbers of keys, "
            "(B,), one for each sequence, or (B, Lq).\nPass a mask as mask=, True = may attend; one row for each "
            "sequence, (B, Lk), as mask=Padding(keep)."
        )
    return Lengths(valid_lens)
