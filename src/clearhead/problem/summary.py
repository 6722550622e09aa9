"""The statistics that a fused pass over the weights gives: the third normal form, to which reductions lower."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Summary(NamedTuple):
    """The statistics of the weights to compute."""

    output: bool = False  # the attention output, for the problem's value
    entropy: bool = False
    normaliser: bool = False
    top: int = 0  # how many of the largest weights
    received: bool = False
    mean: tuple[int, int] | None = None  # the sum over cells of so many queries and keys
    peak: tuple[int, int] | None = None  # their maximum

    def with_also(self, other: Summary) -> Summary | None:
        """Both in one pass; None where their sizes (k, the cells of a map) differ."""
        both = {}
        for name, mine, theirs, nothing in zip(self._fields, self, other, Summary(), strict=True):
            if nothing not in (mine, theirs) and mine != theirs:
                return None
            both[name] = theirs if mine == nothing else mine
        cells = {both["mean"], both["peak"]} - {None}
        return Summary(**both) if len(cells) < 2 else None  # type: ignore[arg-type]


class Found(NamedTuple):
    """The statistics, float32; None where not asked for."""

    output: Tensor | None  # (B, H, Lq, Ev)
    entropy: Tensor | None  # (B, H, Lq)
    largest: Tensor | None  # (B, H, Lq); with the next: see `Normaliser`
    rest: Tensor | None
    values: Tensor | None  # (B, H, Lq, k)
    indices: Tensor | None  # the same, int64
    received: Tensor | None  # (B, H, Lk)
    mean: Tensor | None  # (B, H, rows, columns), sums
    peak: Tensor | None
    finite: bool = True  # whether all inputs read, and the output, are
