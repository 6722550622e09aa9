"""Sequences of unequal lengths that stand one after the other in one row, without padding."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.shapes import Align, Sizes, extent


class Sequences:
    """Which part of a packed row each sequence is, and what mask and bias of a padded batch say about it."""

    def __init__(self, queries: Tensor, keys: Tensor, align: Align) -> None:
        self.queries, self.keys = queries.long(), keys.long()
        self.same = bool(torch.equal(self.queries, self.keys))
        self.align = align
        if isinstance(align, str) and align == "lower_right":
            self.align = self.keys.diff() - self.queries.diff()
        self.query_edges, self.key_edges = list(pairwise(queries.tolist())), list(pairwise(keys.tolist()))
        self.longest = tuple(max([0, *(b - a for a, b in ends)]) for ends in (self.query_edges, self.key_edges))

    @classmethod
    def example(cls, sizes: Sizes) -> Sequences:
        """Three sequences of these queries and keys, of which the second has no query."""
        edges = ((0, n // 3, n // 3 if n == sizes.queries else n // 2, n) for n in sizes[2:4])
        queries, keys = (torch.tensor(edge, device=sizes.device) for edge in edges)
        return cls(queries, keys, "upper_left")

    def check_align(self, *parts: Any) -> None:
        positional = [part for part in parts if getattr(part, "positional", False)]
        if self.align is None and not self.same and positional:
            raise ClearheadError(
                f"{type(positional[0]).__name__} depends on positions, and a sequence's queries and keys differ in "
                'number. Pass align="upper_left" (query 0 of each sequence stands at its key 0) or '
                'align="lower_right" (the last query of each stands at its last key: a key/value cache).'
            )

    def padded(self, sizes: Sizes) -> Sizes:
        """The sizes of the padded batch that the packed row `sizes` stands for."""
        batch, heads = len(self.query_edges), sizes.heads
        queries, keys = self.longest
        leading = (batch,) if len(sizes.shown) == 1 else (batch, heads)
        return Sizes(batch, heads, queries, keys, sizes.device, leading, self.align)

    def inside(
        self, queries: slice, keys: slice, sizes: Sizes
    ) -> list[tuple[int, tuple[slice, slice], tuple[slice, slice]]]:
        """The sequences that a part of the packed row touches: the number of each, where it stands in the part, and the
        part of its own matrix."""
        found = []
        for number, edges in enumerate(zip(self.query_edges, self.key_edges, strict=True)):
            sides = [
                _common(side, size, edge) for side, size, edge in zip((queries, keys), sizes[2:4], edges, strict=True)
            ]
            if all(side is not None for side in sides):
                (query_at, query_of), (key_at, key_of) = sides  # type: ignore[misc]
                found.append((number, (query_at, key_at), (query_of, key_of)))
        return found


def places_in(edges: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """The number of the sequence to which each of these places in a packed row belongs, and the place in it."""
    number = torch.searchsorted(edges[1:].contiguous(), at, right=True)
    return number, at - edges[number]


def padded(packed: Tensor, edges: Tensor, longest: int) -> Tensor:
    """The sequences of a packed row (1, H, T, E) as a padded batch (B, H, L, E), with zeros behind them."""
    place = torch.arange(longest, device=edges.device)
    inside = place < edges.diff()[:, None]
    at = torch.where(inside, edges[:-1, None] + place, packed.shape[2])
    room = packed.new_zeros(1, *packed.shape[1:2], 1, *packed.shape[3:])
    return torch.cat((packed, room), 2)[0][:, at].transpose(0, 1)


def repacked(batch: Tensor, edges: Tensor) -> Tensor:
    """The sequences of a padded batch (B, H, L, E) as a packed row (1, H, T, E)."""
    number, place = places_in(edges, torch.arange(int(edges[-1]), device=edges.device))
    return batch[number, :, place].transpose(0, 1)[None]


def _common(side: slice, size: int, edge: tuple[int, int]) -> tuple[slice, slice] | None:
    """Where the positions of a slice that lie in a sequence stand in the slice, and which they are in the sequence."""
    every = range(*extent(side, size))
    first = max(0, -((every.start - edge[0]) // every.step))
    last = min(len(every), -((every.start - edge[1]) // every.step))
    if first >= last:
        return None
    begin = every[first] - edge[0]
    return slice(first, last), slice(begin, every[last - 1] - edge[0] + 1, every.step)
