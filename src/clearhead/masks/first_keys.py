"""The mask of the first keys."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch

from clearhead.base.numbers import check_count
from clearhead.base.positions import FAR, key_positions
from clearhead.base.shapes import Sizes
from clearhead.base.symbolic.steps import Step, made
from clearhead.masks._draw import LARGEST
from clearhead.masks.base import PAIRS, Mask, Sides, Spans


class FirstKeys(Mask):
    """Every query attends to the first `count` keys, or to all keys if there are fewer.

    >>> import clearhead as ch
    >>> ch.Causal() & (ch.SlidingWindow(before=1) | ch.FirstKeys(2))        # a window, and the first keys as sinks
    Causal() & (SlidingWindow(before=1) | FirstKeys(2))
    ■ · · · · ·
    ■ ■ · · · ·
    ■ ■ ■ · · ·
    ■ ■ ■ ■ · ·
    ■ ■ · ■ ■ ·
    ■ ■ · · ■ ■

    `Lengths` takes one number for each sequence, and raises for a number above Lk. Here `count` may exceed Lk, as in a
    short text or an early decoding step.

    Args:
        count: The number of keys, 0 or more.

    Raises:
        ClearheadError: If `count` is not an integer of at least 0.

    Formula:
        Query i attends to the keys j < count.

    Cost:
        O(1).

    Source:
        Xiao et al. 2024, "Efficient Streaming Language Models with Attention Sinks".
    """

    def __init__(self, count: int) -> None:
        self.count = check_count(count, 0, "FirstKeys: count", most=math.inf)

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls(2)

    def title(self) -> str:
        return f"FirstKeys({self.count})"

    def signature(self) -> Hashable | None:
        return (type(self), self.count)

    def _count_drawn_keys(self) -> int:
        return max(super()._count_drawn_keys(), min(self.count + 1, 2 * LARGEST))

    def steps(self, sizes: Sizes, at: Sides, name: str = "mask") -> list[Step]:
        count = torch.full((1, 1, 1, 1), min(self.count, FAR), dtype=torch.int64, device=sizes.device)
        most = max(sizes.keys, min(self.count, FAR))
        first = Step(f"{name}_count", "The number of first keys: one number.", count, ("1",) * 4, within=(0, most))
        columns = key_positions(sizes, at, f"{name}_positions")
        why = "Every query may attend to the first keys, whose positions are below the number."
        return [first, columns, made(name, why, columns < first, PAIRS)]

    def lower(self, sizes: Sizes) -> Spans:
        start = torch.zeros(1, 1, 1, dtype=torch.int64, device=sizes.device)
        return Spans(start, (start + min(self.count, FAR)).clamp(max=sizes.keys))
