"""The sliding window."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor

from clearhead.base.numbers import check_count
from clearhead.base.positions import FAR, Align, check_align, query_offset, say_align
from clearhead.base.shapes import Sizes
from clearhead.masks.base import Mask, Spans


class SlidingWindow(Mask):
    """Each query sees the keys around its own position, its own included.

    >>> import clearhead as ch
    >>> ch.SlidingWindow(before=2, after=1)
    SlidingWindow(before=2, after=1)
    ■ ■ · · · ·
    ■ ■ ■ · · ·
    ■ ■ ■ ■ · ·
    · ■ ■ ■ ■ ·
    · · ■ ■ ■ ■
    · · · ■ ■ ■

    Rule: query i sees the keys i + p − before ≤ j ≤ i + p + after, where p is the position of query 0.
    `before`, `after`: numbers of positions, 0 or more; what others call a causal window of 256 is before=255.
    `align`: as for `Causal`, needed where Lq ≠ Lk.
    Raises a `ClearheadError` for negative sizes, and where Lq ≠ Lk and no alignment is given.
    Source: Beltagy et al. 2020, "Longformer: The Long-Document Transformer".
    """

    def __init__(self, before: int, after: int = 0, align: Align = None) -> None:
        self.before, self.after = (
            check_count(size, 0, f"SlidingWindow: {name}", most=math.inf)
            for name, size in (("before", before), ("after", after))
        )
        self.align = check_align(align, "SlidingWindow")

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls(before=3, after=1, align="lower_right")

    def title(self) -> str:
        parts = [f"before={self.before}"] + [f"after={self.after}"] * (self.after > 0)
        if self.align is not None:
            parts.append(f"align={say_align(self.align)}")
        return f"SlidingWindow({', '.join(parts)})"

    def offsets(self, sizes: Sizes) -> list[tuple[str, int | Tensor]]:
        return [("SlidingWindow", query_offset(self.align, sizes, "SlidingWindow"))]

    def signature(self) -> Hashable | None:
        return None if isinstance(self.align, Tensor) else (type(self), self.before, self.after, self.align)

    def drawn(self) -> Sizes:
        return Sizes(self.align.numel() if isinstance(self.align, Tensor) else 1, 1, 0, 0)

    def lower(self, sizes: Sizes) -> Spans:
        own = torch.arange(sizes.queries, device=sizes.device).view(1, 1, -1)
        own = own + query_offset(self.align, sizes, "SlidingWindow")
        before, after = min(self.before, FAR), min(self.after, FAR)
        return Spans((own - before).clamp(0, sizes.keys), (own + after + 1).clamp(0, sizes.keys))
