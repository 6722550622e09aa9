"""Keys that no query may attend to, and fully masked rows: whatever they hold, they contribute nothing.

Padding may hold any number. NaN or infinity times a weight of 0 is NaN, in the output or in a gradient, and a number
near the largest float may overflow to infinity on the way.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from clearhead.base.shapes import Sizes, one_or, unflatten
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.tensor_kind import is_on_host, is_readable
from clearhead.masks.base import Spans

# The location of keys that no query may attend to: there are none, all are outside the hull of their sequence's spans,
# or some may be inside it.
Unseen = Literal["none", "outside", "inside"]


def where_unseen(spans: Spans, start: np.ndarray, stop: np.ndarray, sizes: Sizes) -> Unseen:
    """Locate the keys that no query may attend to, by the edges; "inside" if the edges do not decide."""
    if not spans.plain or not sizes.queries or not sizes.keys or (stop <= start).any():
        return "inside"
    if (start[..., 1:] > stop[..., :-1]).any() or (stop[..., 1:] < start[..., :-1]).any():
        return "inside"  # a gap between one query's span and the next's
    # consecutive spans that touch cover all keys between the first and the last
    whole = (start.min(-1) == 0).all() and (stop.max(-1) == sizes.keys).all()
    return "none" if whole else "outside" if start.shape[1] == 1 else "inside"


def seen(spans: Spans, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Compute which keys any query may attend to, and which queries have an allowed key.

    Shapes: (B or 1, H or 1, Lk) and (B or 1, H or 1, Lq or 1).
    """
    if spans.residual is None:
        start, stop = spans.intervals()
        return _covered(spans, sizes), (stop > start).any(-1)
    every = slice(None)
    if get_mode().compiled:
        keep = spans.keep(every, every, every, every, sizes.keys)
        return keep.any(2), keep.any(3)
    keys, queries, rows = [], [], 256
    for row in range(0, sizes.queries, rows):
        keep = spans.keep(every, every, slice(row, row + rows), every, sizes.keys)
        keys.append(keep.any(2))
        queries.append(keep.any(3))
        if keep.shape[2] == 1:  # one row broadcasts to all queries
            break
    if not keys:
        nothing = torch.zeros(1, 1, 1, dtype=torch.bool, device=sizes.device)
        return nothing, nothing
    return torch.stack(keys).any(0), torch.cat(queries, -1)


def _covered(spans: Spans, sizes: Sizes) -> Tensor:
    """Compute the keys inside some query's intervals, (B or 1, H or 1, Lk), by counting starts minus stops."""
    # clamp: an empty interval may have any edges
    start, stop = (edge.flatten(-2).clamp(0, sizes.keys) for edge in spans.intervals())
    start = start.expand_as(stop)
    change = torch.zeros(*start.shape[:2], sizes.keys + 1, dtype=torch.int64, device=start.device)
    one = torch.ones((), dtype=torch.int64, device=start.device).expand(start.shape)
    change = change.scatter_add(-1, start, one).scatter_add(-1, stop, -one)
    return change.cumsum(-1)[..., : sizes.keys] > 0


def group(keys: Tensor, key_heads: int) -> Tensor:
    """Reduce keys of query heads to keys that some query of the group may attend to, (B or 1, Hk or 1, Lk)."""
    return keys if one_or(keys.shape[1], key_heads) else unflatten(keys, 1, key_heads, -1).any(2)


def zero(tensor: Tensor, visible: Tensor, only_not_finite: bool = False) -> Tensor:
    """Set rows that are not `visible`, (B or 1, H or 1, L), to 0, or only their non-finite entries."""
    where = (~visible.unsqueeze(-1)).expand(*tensor.shape[:-1], 1)  # masked_fill broadcasts only the mask
    return tensor.masked_fill(where & ~tensor.isfinite() if only_not_finite else where, 0.0)


def finite(tensor: Tensor) -> bool:
    """Return whether every entry is known to be finite, in one pass: a finite sum has finite terms.

    False if the sum overflows, if the values cannot be read, and on another device, whose read would block the host.
    Callers are correct for both answers.
    """
    if not is_on_host(tensor) or not is_readable(tensor):
        return False
    with torch.no_grad():
        return math.isfinite(float(tensor.sum())) or bool(tensor.isfinite().all())
