"""Where query 0 stands among the keys, the same for every mask and bias of a call; and positions as steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import is_whole, to_tensor
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.shapes import Align, Sides, Sizes, one_or, part, placed
from clearhead.base.symbolic.steps import PAIRS, Step
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.tensor_kind import holds_all_bytes

FAR = 2**40  # beyond any length; sums of such numbers do not overflow int64

_ADVICE = (
    'Pass align="upper_left" (query 0 stands at key 0), align="lower_right" (the last query stands at the last key: '
    "a key/value cache), the position of query 0, or a (B,) integer tensor of these positions."
)


def check_align(align: Any) -> Align:
    """The alignment of a call as it was given; an array becomes a tensor. Raises for anything else."""
    if align is None or (isinstance(align, str) and align in ("upper_left", "lower_right")):
        return align  # type: ignore[return-value]
    if isinstance(align, int | np.integer) and not isinstance(align, bool):
        return max(-FAR, min(int(align), FAR))
    if isinstance(align, str) or not hasattr(align, "shape"):
        raise ClearheadError(f"align is {align!r:.60}. {_ADVICE}")
    plain = align.dtype is torch.int64 and align.ndim < 2 and get_mode().eager
    if plain and type(align) is Tensor and holds_all_bytes(align):
        return align.clamp(-FAR, FAR)
    positions = to_tensor(align, "align")
    if not is_whole(positions) or positions.ndim > 1:
        raise ClearheadError(
            f"align has dtype {positions.dtype}, shape {tuple(positions.shape)}; expected integers (B,). {_ADVICE}"
        )
    return positions.detach().long().clamp(-FAR, FAR)


def query_offset(sizes: Sizes, who: str) -> int | Tensor:
    """The position of query 0 among the keys: a number, or a tensor (B or 1, 1, 1). `who` is named in the error.

    >>> import clearhead as ch
    >>> ch.extend.query_offset(ch.extend.Sizes(1, 1, 3, 5, align="lower_right"), "MyMask")
    2
    """
    align = sizes.align
    if isinstance(align, Tensor):
        if not one_or(align.numel(), sizes.batch):
            raise ShapeError(
                f"align has shape {tuple(align.shape)} and the batch is {sizes.batch}; expected ({sizes.batch},): the "
                "position of query 0 of each sequence."
            )
        return placed(align, sizes.device, "align").reshape(-1, 1, 1)
    if isinstance(align, int):
        return align
    if align == "lower_right":
        return sizes.keys - sizes.queries
    if align is None and sizes.queries != sizes.keys:
        raise ClearheadError(f"{who}: {sizes.queries} queries and {sizes.keys} keys, and no alignment.\n{_ADVICE}")
    return 0


def positions(sizes: Sizes, at: Sides, name: str, who: str) -> tuple[Step, Step]:
    """The positions of the queries as a column, `{name}_queries`, and of the keys as a row, `{name}_keys`. `who` is
    named in the error where the call gives no alignment."""
    own = torch.arange(sizes.queries, device=sizes.device).view(1, 1, -1) + query_offset(sizes, who)
    rows = part(own, *at[:3]).unsqueeze(-1)
    of_queries = "The position of each query among the keys, from 0 on: a column, (…, 1)."
    return Step(f"{name}_queries", of_queries, rows, (*PAIRS[:3], "1")), key_positions(sizes, at, f"{name}_keys")


def key_positions(sizes: Sizes, at: Sides, name: str) -> Step:
    """The row of the keys' positions."""
    columns, most = torch.arange(sizes.keys, device=sizes.device)[at[3]], max(sizes.keys - 1, 0)
    return Step(name, "The position of each key, from 0 on: a row.", columns, ("Lk",), within=(0, most))
