"""`mask=` and `valid_lens=`, as functions and modules take them."""

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
    """The mask and the bias of a call of `attention`, which checks a mask without lengths itself."""
    return (mask, bias) if valid_lens is None else with_lengths(mask, valid_lens, bias)


def with_lengths(mask: Any, valid_lens: Any, bias: Any = None) -> tuple[Any, Any]:
    """The mask joined with the lengths, and the bias beside it, as `attention` takes them. A float mask beside lengths
    becomes a part of the bias: the lengths still say which pairs are left out."""
    check_mask(mask)
    if valid_lens is None:
        return mask, bias
    lengths = _as_lengths(valid_lens)
    if mask is None:
        return lengths, bias
    if isinstance(mask, Mask):
        return mask & lengths, bias
    if not isinstance(mask, Tensor | np.ndarray):
        return mask, bias  # attention() raises for it
    if not to_tensor(mask, "mask").is_floating_point():
        return DenseMask(mask) & lengths, bias
    if isinstance(bias, Tensor | np.ndarray):
        bias = DenseBias(bias)
    if bias is None:
        return lengths, DenseBias(mask)
    return lengths, DenseBias(mask) + bias if isinstance(bias, Bias) else bias


def check_mask(mask: Any) -> None:
    """Refuse integers: they may be lengths, or a tokenizer's mask."""
    if mask is None:
        return
    if isinstance(mask, list | tuple | range) or is_nested(mask):
        raise ClearheadError(
            f"mask is {brief(mask)}; expected a Mask, such as Causal(), a bool tensor (True: may attend), or a float "
            "tensor (added to the scores).\nFor how many keys may be seen pass valid_lens=..., or mask=Lengths(...)."
        )
    if isinstance(mask, Tensor | np.ndarray) and is_whole(mask):
        refuse_additive(mask, "mask")
        raise ClearheadError(
            f"mask has dtype {mask.dtype}, shape {tuple(mask.shape)}; expected bool, True where a query may attend, or "
            "float, added to the scores.\nFor lengths pass valid_lens=mask, or mask=Lengths(mask); for a tokenizer's "
            "0/1 attention_mask mask=Padding(mask); for another 0/1 matrix mask=DenseMask(mask.bool())."
        )


def _as_lengths(valid_lens: Any) -> Lengths:
    """Integers, one a sequence or one a query; raises for a mask, and names the argument that takes it."""
    numbers = None if isinstance(valid_lens, Mask) else as_tensor(valid_lens, "valid_lens")
    if numbers is None or numbers.dtype == torch.bool or not numbers.ndim:
        raise ClearheadError(
            f"valid_lens is {valid_lens.title() if numbers is None else shown(numbers)}; it takes integers (B,), one "
            "for each sequence, or (B, Lq): how many keys may be seen.\nPass a mask as mask=, True where a query may "
            "attend; of shape (B, Lk), one row a sequence, as mask=Padding(keep)."
        )
    return Lengths(valid_lens)
