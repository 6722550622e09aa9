"""A mask given as one interval of keys for each query."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.base.shapes import Sizes, placed
from clearhead.masks._read import check_integers, own
from clearhead.masks.base import Mask, Spans


class Intervals(Mask):
    """Each query attends to one interval of keys, given by its start and stop.

    >>> import torch
    >>> from clearhead.masks import Intervals
    >>> Intervals(torch.tensor([0, 1, 2]), torch.tensor([2, 4, 3]))
    Intervals(<3>)
    ■ ■ · ·
    · ■ ■ ■
    · · ■ ·

    Recorded masks whose rows are intervals become `Intervals`.

    Args:
        start: The first key of each query: integers (Lq,), (B, Lq) or (B, H, Lq). Sizes of 1 broadcast.
        stop: One more than the last key of each query, same shape.

    Raises:
        ClearheadError: If an argument has another dtype or shape.

    Formula:
        Query i attends to the keys start[..., i] ≤ j < stop[..., i].

    Cost:
        O(B·H·Lq).
    """

    def __init__(self, start: Any, stop: Any) -> None:
        shapes = "(Lq,), (B, Lq) or (B, H, Lq)."
        self.start = own(check_integers(start, "Intervals: start", (1, 2, 3), shapes))
        self.stop = own(check_integers(stop, "Intervals: stop", (1, 2, 3), shapes))

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        start = torch.arange(sizes.queries, device=sizes.device) % max(sizes.keys, 1)
        return cls(start, (start + 3).clamp(max=sizes.keys))

    def depends(self) -> tuple[Tensor, ...]:
        return self.start, self.stop

    def title(self) -> str:
        return f"Intervals(<{'×'.join(map(str, self.start.shape))}>)"

    def drawn(self) -> Sizes:
        batch, heads, queries = _three(self.start).shape
        return Sizes(batch, heads, queries, int(self.stop.max()) if self.stop.numel() else 0)

    def lower(self, sizes: Sizes) -> Spans:
        start, stop = (placed(_three(edge), sizes.device, "Intervals") for edge in (self.start, self.stop))
        return Spans(start.clamp(0, sizes.keys), stop.clamp(0, sizes.keys))


def _three(edge: Tensor) -> Tensor:
    """Return edges as (B or 1, H or 1, Lq)."""
    if edge.ndim == 2:
        edge = edge.unsqueeze(1)
    return edge.reshape((1,) * (3 - edge.ndim) + tuple(edge.shape))
