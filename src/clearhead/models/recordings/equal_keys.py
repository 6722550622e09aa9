"""Which keys of a call are those of the call before, bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from clearhead.base.torch_state.tensor_kind import is_readable
from clearhead.base.torch_state.versions import bits


def comparable(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout == torch.strided and is_readable(tensor) and tensor.numel() > 0


def find_continued_rows(
    mine: Tensor,
    tensor: Tensor,
    pairs: list[tuple[int, int, int]],
    among: Tensor | None,
    whole: bool,
    match: Callable[[Tensor, Tensor], bool] | None = None,
) -> Tensor | None:
    """Which rows of `mine` each row of a tensor may continue, bool (rows, rows of mine); None where a row has none.

    `pairs`: places of the tensor, from and to, and the offset of the same keys in `mine`. `among`: the pairs of rows
    to compare; None: all. `whole`: where each row may continue its own, no other pair is compared. `match`: whether two
    tensors are the same; None: bit by bit.
    """

    def same(row: slice, of: slice) -> bool:
        return all(
            (match or equal)(tensor[row, :, low:high], mine[of, :, low + offset : high + offset])
            for low, high, offset in pairs
        )

    count, rows = mine.shape[0], tensor.shape[0]
    every = slice(None)
    own = torch.eye(rows, count, dtype=torch.bool, device="cpu")
    if count == rows and (whole or count == 1 or (among is not None and is_own(among))) and same(every, every):
        return own
    if count == rows == 1:
        return None
    if match is None:
        _, high, offset = pairs[0]
        last, of_mine = (bits(t)[:, :, place - 1] for t, place in ((tensor, high), (mine, high + offset)))
        alike = (last[:, None] == of_mine[None]).all(-1).all(-1).cpu()  # most rows that differ do so at the last key
    else:
        alike = torch.ones(rows, count, dtype=torch.bool, device="cpu")
    if among is not None and among.shape == alike.shape:
        alike &= among
    if is_own(alike) and same(every, every):
        return alike
    for row, of in alike.nonzero().tolist():
        alike[row, of] = same(slice(row, row + 1), slice(of, of + 1))
    return alike if bool(alike.any(1).all()) else None


def is_own(rows: Tensor) -> bool:
    """Whether each row may continue its own row alone."""
    return torch.equal(rows, torch.eye(*rows.shape, dtype=torch.bool, device="cpu")) and rows.shape[0] == rows.shape[1]


def nearly_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors (B, Hk, L, E), with L > 0, differ by the rounding of one product alone."""
    info = torch.finfo(one.dtype)
    most = (16 if info.bits >= 32 else 2) * info.eps * other.abs().max()
    return one.shape == other.shape and bool(((one - other).abs() <= most).all())


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors (B, Hk, L, E), with L > 0, are the same, bit by bit."""
    if one.shape != other.shape:
        return False
    one, other = bits(one), bits(other)
    if not one.is_cpu:
        return torch.equal(one, other)
    mine, theirs = one.numpy(), other.numpy()  # three times as fast as torch.equal
    if len(mine) > 1 and not (mine[:, :, -1] == theirs[:, :, -1]).all():
        return False  # beams that differ do so at the last key, which is compared first
    if mine.shape[3] * mine.itemsize % 8 == 0 and mine.strides[3] == theirs.strides[3] == mine.itemsize:
        mine, theirs = mine.view(np.int64), theirs.view(np.int64)
    return bool((mine == theirs).all())
