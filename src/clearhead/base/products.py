"""Matrix products in which an infinite row reaches no other row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.base.torch_state.contexts import is_autocasting
from clearhead.base.torch_state.mode import assume_constant, get_mode
from clearhead.base.torch_state.torch_private import amx

TILE = 32  # numbers of bfloat16 in a row of an AMX tile


@assume_constant
def has_matrix_instructions(dtype: torch.dtype) -> bool:
    """True if this CPU multiplies matrices of `dtype` by matrix instructions (AMX), as PyTorch's kernels then do."""
    asked = amx.get(dtype)
    return asked is not None and bool(asked())


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Multiply rows by a matrix, `left @ right`, so that a row that is not finite reaches no other row.

    On a CPU with AMX, PyTorch's product of bfloat16 matrices reads past the end of a row where the inner width is odd,
    or above 32 and no multiple of 32: a row gets NaN from an infinite row after it. There all sizes are padded with
    zeros to multiples of 32, because each of them is the inner width of a product in the forward or backward pass.

    Args:
        left: Rows, (..., n, m).
        right: The matrix, (m, d).

    Returns:
        The product, (..., n, d).
    """
    low = left.dtype == torch.bfloat16 or is_autocasting(left.device)
    if not low or left.device.type != "cpu" or not has_matrix_instructions(torch.bfloat16):
        return left @ right
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    more_rows, more_inner, more_columns = (-size % TILE for size in (rows, inner, columns))
    # compiled code pads in every case: a condition on the number of rows would bind the code to some lengths
    if not get_mode().compiled and not more_rows + more_inner + more_columns:
        return left @ right
    padded = F.pad(left, (0, more_inner, 0, more_rows)) @ F.pad(right, (0, more_columns, 0, more_inner))
    return padded[..., :rows, :columns]
