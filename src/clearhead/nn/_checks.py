"""What several modules check of their arguments."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clearhead.base.arrays import check_float
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.numbers import check_count


def check_embedded(x: Any, width: int, who: str) -> None:
    """Vectors (..., L, width) of floating point."""
    if not isinstance(x, Tensor):
        raise ClearheadError(f"{who}: x is a {type(x).__name__}; pass a tensor (..., L, {width}).")
    check_float(x, f"{who}: x")
    if x.ndim < 2 or x.shape[-1] != width:
        raise ShapeError(
            f"{who}: x has shape {tuple(x.shape)}; expected (..., L, {width}): positions, then emb_dim = {width}."
        )


def check_offset(offset: Any, who: str) -> int:
    """The position of the first vector."""
    if isinstance(offset, Tensor):
        raise ClearheadError(
            f"{who}: offset is a tensor {tuple(offset.shape)}; expected a whole number: int(offset). "
            "One position a sequence is what RotaryEmbedding takes."
        )
    return check_count(offset, 0, f"{who}: offset", most=2**24)
