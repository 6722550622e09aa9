"""The causal mask."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from clearhead.base.positions import Align, check_align, query_offset, say_align
from clearhead.base.shapes import Sizes
from clearhead.masks.base import Mask, Spans


class Causal(Mask):
    """Each query sees the keys up to its own position.

    >>> import clearhead as ch
    >>> ch.Causal()
    Causal()
    ■ · · · · ·
    ■ ■ · · · ·
    ■ ■ ■ · · ·
    ■ ■ ■ ■ · ·
    ■ ■ ■ ■ ■ ·
    ■ ■ ■ ■ ■ ■

    Rule: query i sees the keys j ≤ i + p, where p is the position of query 0.
    `align`: needed where Lq ≠ Lk: "upper_left" (p = 0), "lower_right" (p = Lk − Lq), or a (B,) tensor of p.
    Raises a `ClearheadError` where Lq ≠ Lk and no alignment is given.
    """

    def __init__(self, align: Align = None) -> None:
        self.align = check_align(align, "Causal")

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls(align="lower_right")

    def title(self) -> str:
        return "Causal()" if self.align is None else f"Causal(align={say_align(self.align)})"

    def offsets(self, sizes: Sizes) -> list[tuple[str, int | Tensor]]:
        return [("Causal", query_offset(self.align, sizes, "Causal"))]

    def signature(self) -> Hashable | None:
        return None if isinstance(self.align, Tensor) else (type(self), self.align)

    def drawn(self) -> Sizes:
        return Sizes(self.align.numel() if isinstance(self.align, Tensor) else 1, 1, 0, 0)

    def lower(self, sizes: Sizes) -> Spans:
        own = torch.arange(1, sizes.queries + 1, device=sizes.device).view(1, 1, -1)
        own = own + query_offset(self.align, sizes, "Causal")
        return Spans(torch.zeros_like(own[:1, :, :1]), own.clamp(0, sizes.keys))
