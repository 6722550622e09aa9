"""The mask of a module with heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import owned
from clearhead.base.errors import ShapeError, columns
from clearhead.base.shapes import broadcasts
from clearhead.base.tracing import autocasting
from clearhead.masks.base import Mask
from clearhead.masks.dense import check_keep
from clearhead.problem.lengths import check_mask


def head_mask(mask: Any, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> Any:
    """A mask as `attention` takes it beside (B, H, L, E): (Lq, Lk), or (B or 1, H or 1, Lq or 1, Lk or 1)."""
    check_mask(mask)
    if mask is None or isinstance(mask, Mask) or not isinstance(mask, Tensor | np.ndarray):
        return mask  # attention() raises for anything else
    tensor = owned(mask, "mask")
    if not tensor.is_floating_point():
        check_keep(tensor, "mask")
    elif tensor.dtype != dtype and autocasting(tensor.device):
        tensor = tensor.to(dtype)  # as autocast did with the projections
    four = tensor.unsqueeze(1) if tensor.ndim == 3 else tensor
    if 2 <= four.ndim <= 4 and broadcasts(four.shape, sizes):
        return four
    shape = tuple(tensor.shape)
    rows = {"scores": sizes, "mask": (shape[0], "", *shape[1:]) if len(shape) == 3 else shape}
    raise ShapeError(
        f"mask has shape {shape}, which does not fit the scores (B, H, Lq, Lk).\n{columns(rows)}\n"
        "A mask of two dimensions is (Lq, Lk), of three (B, Lq, Lk), of four (B, H, Lq, Lk); True: may attend."
        + _advice(shape, sizes, tensor.dtype == torch.bool)
    )


def _advice(shape: tuple[int, ...], sizes: tuple[int, int, int, int], is_bool: bool) -> str:
    batch, heads, _, keys = sizes
    turned = "~mask" if is_bool else "mask"
    if shape == (batch,) and not is_bool:
        return "\nIt seems to be lengths, (B,): pass valid_lens=mask.long()."
    if shape == (batch, keys):
        return (
            "\nIt seems to be padding, (B, Lk): pass Padding(mask), or, where it is a key_padding_mask of torch "
            "(True: may not), Padding(~mask)."
            if is_bool
            else "\nIt seems to be of padding, (B, Lk), added to the scores: pass mask[:, None]."
        )
    if len(shape) == 3 and shape[0] == heads:
        return "\nOne mask for each head is mask[None]."
    if len(shape) == 3 and shape[0] == batch * heads:
        return f"\nAn attn_mask of torch, (B·H, Lq, Lk), is {turned}.unflatten(0, ({batch}, {heads})) here."
    return "\nWith a cache, Lk counts the keys in it too. For the keys that are no padding pass Padding(keep)."
