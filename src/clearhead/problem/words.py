"""Which positions of a call are words, and which are padding."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from clearhead.base.output.text import with_outline


@with_outline
class Words(NamedTuple):
    """Which positions are words and no padding: bool, True for a word; None where all are words.

    `queries` (B, Lq), `keys` (B, Lk).
    """

    queries: Tensor | None = None
    keys: Tensor | None = None

    def of(self, sequences: slice) -> Words:
        """The words of some sequences of the batch."""
        return Words(*(None if side is None else side[sequences] for side in self))


ALL_WORDS = Words()
