"""Checks of arguments that several modules share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clearhead.base.arrays import check_float
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.numbers import check_count
from clearhead.base.tracing import autocasting


def check_embedded(x: Any, width: int, who: str) -> None:
    """Vectors (..., L, width) of floating point."""
    if not isinstance(x, Tensor):
        raise ClearheadError(f"{who}: x is a {type(x).__name__}; pass a tensor (..., L, {width}).")
    check_float(x, f"{who}: x")
    if x.ndim < 2 or x.shape[-1] != width:
        raise ShapeError(
            f"{who}: x has shape {tuple(x.shape)}; expected (..., L, {width}): positions, then embed_dim = {width}."
        )


def check_offset(offset: Any, who: str) -> int:
    """The position of the first vector."""
    if isinstance(offset, Tensor):
        raise ClearheadError(
            f"{who}: offset is a tensor {tuple(offset.shape)}; expected a whole number: int(offset). "
            "One position a sequence is what RotaryEmbedding takes."
        )
    return check_count(offset, 0, f"{who}: offset", most=2**24)


def check_dtype(name: str, tensor: Tensor, weight: Tensor, weight_name: str) -> None:
    """Check for the dtype and the device of the weight that projects it."""
    other_dtype = tensor.dtype != weight.dtype and not autocasting(tensor.device)
    if other_dtype or tensor.device != weight.device:
        raise ClearheadError(
            f"{name}, shape {tuple(tensor.shape)}, is {tensor.dtype} on {tensor.device}, and the module's weights are "
            f"{weight.dtype} on {weight.device}.\nPass module.to({name}) once, or {name}.to(module.{weight_name})."
        )
