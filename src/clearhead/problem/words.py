"""Which positions of a call are tokens, and which are padding."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from clearhead.base.output.text import with_outline


@with_outline
class Words(NamedTuple):
    """Which positions are tokens and not padding: bool, True = token; None if all are tokens.

    Attributes:
        queries: The queries, (B, Lq).
        keys: The keys, (B, Lk).
    """

    queries: Tensor | None = None
    keys: Tensor | None = None

    def of(self, sequences: slice) -> Words:
        """Return the token mask of some sequences of the batch."""
        return Words(*(None if side is None else side[sequences] for side in self))


ALL_WORDS = Words()
