"""Pairs of a query and a key with equal tokens."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from clearhead.masks.base import Edges


class Pairs(NamedTuple):
    """For each query the keys that have its token, int64 (B or 1, Lq) and (B or 1, Lk).

    `within`: of these the ones in intervals of places, (B or 1, 1, Lq, n) as `Spans.intervals` has them; None for all.
    """

    asked: Tensor
    held: Tensor
    within: Edges | None = None
