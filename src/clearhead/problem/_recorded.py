"""The mask of a recorded call."""

from __future__ import annotations

from clearhead.base.shapes import Sizes
from clearhead.masks.base import Mask, Spans


class RecordedMask(Mask):
    """The spans of one recorded call, as a mask to show.

    Args:
        spans: The spans of the call.
        sizes: Its sizes.
        said: The title of the mask of the call; None if it is unknown.
    """

    def __init__(self, spans: Spans, sizes: Sizes, said: str | None = None) -> None:
        self.of, self.sizes, self.said = spans, sizes, said

    def title(self) -> str:
        return self.said or f"RecordedMask(<{'×'.join(map(str, self.sizes.shape))}>)"

    def drawn(self) -> Sizes:
        return self.sizes

    def lower(self, sizes: Sizes) -> Spans:
        return self.of
