"""A mask of the same keys for every query."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from clearhead.base.shapes import Sizes
from clearhead.masks.base import Mask, Spans


class Between(Mask):
    """Every query may see the keys start ≤ j < stop. It serves the examples of `And`, `Or` and `Not`."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls(sizes.keys // 3, sizes.keys)

    def signature(self) -> Hashable | None:
        return (type(self), self.start, self.stop)

    def title(self) -> str:
        return f"Between({self.start}, {self.stop})"

    def lower(self, sizes: Sizes) -> Spans:
        edges = torch.tensor([self.start, self.stop], device=sizes.device).clamp(0, sizes.keys)
        return Spans(edges[0].view(1, 1, 1), edges[1].view(1, 1, 1))
