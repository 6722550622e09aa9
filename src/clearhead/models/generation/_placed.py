"""What the steps of a generation have of each pair, by the places of queries and keys in the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from clearhead.base.shapes import extent, part
from clearhead.biases.base import Part
from clearhead.models.generation._cached import Link
from clearhead.problem.problem import Problem

if TYPE_CHECKING:
    from clearhead.models.attention_call import AttentionCall

EVERY = slice(None)


class Step(NamedTuple):
    """A call of a generation, and what of it is in the joined matrix.

    `queries`: how many, its first; the others were rejected, and their places taken by later ones. `end`: the place
    where the keys end that are of its sequence. `rows`: see `Cached.before`.
    """

    call: AttentionCall
    link: Link
    rows: Tensor | None
    queries: int
    end: int

    @property
    def problem(self) -> Problem:
        return self.call.kept.problem

    def of_rows(self, tensor: Tensor) -> Tensor:
        """A tensor (B or 1, …) of this call for the rows that continue it."""
        return tensor if self.rows is None or tensor.shape[0] == 1 else tensor[self.rows]

    def of_queries(self, tensor: Tensor) -> Tensor:
        """A tensor (B or 1, H or 1, Lq or 1, …) for its rows and queries that count."""
        some = self.of_rows(tensor)[:, :, : self.queries]
        return some.expand(-1, -1, self.queries, *some.shape[3:])


class Placed(NamedTuple):
    """What some calls have of each pair, placed at their queries and keys; `outside` elsewhere."""

    steps: list[Step]
    tiles: Sequence[Part | None]  # of each call, all of its own batch
    outside: float | bool
    shape: tuple[int, int, int, int]

    def part(self, batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
        """The part that these slices name."""
        top, bottom, row_step = extent(queries, self.shape[2])
        left, right, column_step = extent(keys, self.shape[3])
        lead = [len(range(size)[side]) for size, side in zip(self.shape, (batch, heads), strict=False)]
        columns, first, parts = max(right - left, 0), 0, []
        of = self.steps[-1].call.query
        nothing = of.new_full((), self.outside, dtype=torch.bool if self.outside is True else torch.float32)
        for step, tile in zip(self.steps, self.tiles, strict=True):
            low, high = max(top, first), min(bottom, first + step.queries)
            if low < high:
                found = nothing.repeat(*lead, high - low, columns)
                start, stop = max(left, step.link.base), min(right, step.link.base + step.link.length)
                if tile is not None and start < stop:
                    places = slice(start - step.link.base, stop - step.link.base)
                    some = step.of_rows(tile(EVERY, heads, slice(low - first, high - first), places))
                    found[..., start - left : stop - left] = part(some, batch)
                parts.append(found)
            first += step.queries
        whole = torch.cat(parts, 2) if parts else nothing.repeat(*lead, 0, columns)
        return whole[:, :, ::row_step, ::column_step]
