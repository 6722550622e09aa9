"""The causal mask."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from clearhead.base.arrays import is_causal_bias
from clearhead.base.positions import positions, query_offset
from clearhead.base.shapes import Align, Sizes
from clearhead.base.symbolic.steps import Step, made
from clearhead.masks.base import PAIRS, Mask, Sides, Spans


class Causal(Mask):
    """Causal mask: each query attends to the keys up to its own position.

    >>> import clearhead as ch
    >>> ch.Causal()
    Causal()
    ■ · · · · ·
    ■ ■ · · · ·
    ■ ■ ■ · · ·
    ■ ■ ■ ■ · ·
    ■ ■ ■ ■ ■ ·
    ■ ■ ■ ■ ■ ■

    The position of query 0 is `align=` of the call, which is required where Lq ≠ Lk; without it a call raises a
    `ClearheadError`.

    Formula:
        Query i attends to the keys j ≤ i + p, where p is the position of query 0.

    Cost:
        O(Lq).
    """

    positional = True

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls()

    def signature(self) -> Hashable | None:
        return type(self)

    def steps(self, sizes: Sizes, at: Sides, name: str = "mask") -> list[Step]:
        rows, columns = positions(sizes, at, name, "Causal")
        why = (
            "A query may attend to the keys up to its own position, and to none after it: a model that generates a "
            "text has no later tokens yet. The column and the row broadcast to a matrix."
        )
        return [rows, columns, made(name, why, columns <= rows, PAIRS)]

    def lower(self, sizes: Sizes) -> Spans:
        own = torch.arange(1, sizes.queries + 1, device=sizes.device).view(1, 1, -1)
        own = own + query_offset(sizes, "Causal")
        return Spans(torch.zeros_like(own[:1, :, :1]), own.clamp(0, sizes.keys))


def causal_alignment(mask: Tensor) -> Align:
    """Return the alignment of PyTorch's causal mask (`is_causal_bias`); None for other tensors."""
    if not is_causal_bias(mask) or not hasattr(mask, "variant"):
        return None
    return "upper_left" if mask.variant.name == "UPPER_LEFT" else "lower_right"
