"""The mask of the keys that a cache holds, which needs no validation."""

from __future__ import annotations

from torch import Tensor

from clearhead.masks._read import Known
from clearhead.masks.lengths import Lengths


class HeldKeys(Lengths):
    """The first keys of each sequence, as many as a cache has counted: `Lengths` with values known on the host.

    Args:
        lengths: How many keys each sequence has, int64 (B,), or (1,) for all; no call writes to it.
        ends: The same numbers.
    """

    ends: tuple[int, ...]

    def __init__(self, lengths: Tensor, ends: tuple[int, ...]) -> None:
        vars(self).update(valid_lens=lengths, ends=ends)  # skips the checks of Lengths: a cache counts right

    def _read(self) -> Known:
        return Known(((len(self.ends),), *self.ends), max(self.ends, default=None))

    def title(self) -> str:
        return f"Lengths({[*self.ends]})" if len(self.ends) <= 8 else f"Lengths(<{len(self.ends)} lengths>)"
