"""The sliding window mask."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch

from clearhead.base.numbers import check_count
from clearhead.base.positions import FAR, positions, query_offset
from clearhead.base.shapes import Sizes
from clearhead.base.symbolic.steps import Step, made
from clearhead.masks._draw import LARGEST
from clearhead.masks.base import PAIRS, Mask, Sides, Spans


class SlidingWindow(Mask):
    """Sliding window: each query attends to the keys around its own position.

    >>> import clearhead as ch
    >>> ch.SlidingWindow(before=2, after=1)
    SlidingWindow(before=2, after=1)
    ■ ■ · · · ·
    ■ ■ ■ · · ·
    ■ ■ ■ ■ · ·
    · ■ ■ ■ ■ ·
    · · ■ ■ ■ ■
    · · · ■ ■ ■

    The query's own position is part of the window, and `before` and `after` do not count it: a causal window of 256
    positions (`sliding_window=256` in transformers) is `before=255`. Where Lq ≠ Lk a call needs `align=`, as for
    `Causal`.

    Args:
        before: The number of positions before the query's own, 0 or more.
        after: The number of positions after it, 0 or more (default 0).

    Raises:
        ClearheadError: If a number is negative, or no integer.

    Formula:
        Query i attends to the keys i + p − before ≤ j ≤ i + p + after, where p is the position of query 0.

    Cost:
        O(Lq).

    Source:
        Beltagy et al. 2020, "Longformer: The Long-Document Transformer".
    """

    positional = True

    def __init__(self, *, before: int, after: int = 0) -> None:
        self.before = check_count(before, 0, "SlidingWindow: before", most=math.inf)
        self.after = check_count(after, 0, "SlidingWindow: after", most=math.inf)

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls(before=3, after=1)

    def title(self) -> str:
        parts = [f"before={self.before}"] + [f"after={self.after}"] * (self.after > 0)
        return f"SlidingWindow({', '.join(parts)})"

    def signature(self) -> Hashable | None:
        return (type(self), self.before, self.after)

    def _count_drawn_keys(self) -> int:
        return max(super()._count_drawn_keys(), min(self.before + self.after + 2, 2 * LARGEST))

    def steps(self, sizes: Sizes, at: Sides, name: str = "mask") -> list[Step]:
        rows, columns = positions(sizes, at, name, "SlidingWindow")
        before, after = min(self.before, FAR), min(self.after, FAR)
        why = f"A query may attend to the key at its own position, {before} before it, and {after} after it."
        keep = (columns >= rows - before) & (columns <= rows + after)
        return [rows, columns, made(name, why, keep, PAIRS)]

    def lower(self, sizes: Sizes) -> Spans:
        own = torch.arange(sizes.queries, device=sizes.device).view(1, 1, -1)
        own = own + query_offset(sizes, "SlidingWindow")
        before, after = min(self.before, FAR), min(self.after, FAR)
        return Spans((own - before).clamp(0, sizes.keys), (own + after + 1).clamp(0, sizes.keys))
