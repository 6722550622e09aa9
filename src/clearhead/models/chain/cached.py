"""Keys, or values, as the calls of a generation had them, each kept once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Link(NamedTuple):
    """What one call had, (B, Hk, L, E): that of the call before it in its chain, but for what it says here.

    Places count from the chain's first key on; this call had `length` of them, from `base` on: a window moves. `new`
    (B, Hk, n, E) stands at the places from `start` on; before and after it stands what the call before had, and zeros
    where none had anything, as in a static cache. `rows`, bool (B, rows before): which rows of the call before each row
    may continue, as beams do; None: its own. The layers of a run share it: keys of a window do not tell apart beams
    that have the same tokens in it, those of another layer may. `filled`: the place after the last key that was in
    use. `query`: the place of the call's first query; where the keys are of another sequence, by the self attention
    before it; None: unknown.
    """

    base: int
    length: int
    start: int
    new: Tensor
    filled: int
    rows: Tensor | None = None
    query: int | None = None

    @property
    def parents(self) -> Tensor | None:
        """Which row of the call before each row continues, int64 (B,); None: its own."""
        rows = self.rows
        if rows is None or (rows.shape[0] == rows.shape[1] and bool(rows.diagonal().all())):
            return None
        return rows.int().argmax(1)

    def check(self, before: Link | None) -> None:
        """Raise a ValueError where this cannot follow `before`: a file may hold anything."""
        new, first = self.new, self if before is None else before
        stop = self.start + new.shape[2]
        fits = new.ndim == 4 and new.is_floating_point() and new.dtype == first.new.dtype
        fits = fits and (new.shape[1], new.shape[3]) == (first.new.shape[1], first.new.shape[3])
        last = self.base + self.length
        fits = fits and 0 <= self.base <= self.start <= stop <= last and self.base <= self.filled <= last
        # each place up to `filled` stands here or before
        fits = fits and self.start <= (0 if before is None else before.filled)
        fits = fits and (stop == self.filled or (self.start == self.base and stop == last))
        if self.rows is None:
            fits = fits and new.shape[0] == first.new.shape[0]
        else:
            rows, count = self.rows, first.new.shape[0]
            fits = fits and before is not None and rows.dtype == torch.bool
            fits = fits and tuple(rows.shape) == (new.shape[0], count) and bool(rows.any(1).all())
        if not fits:
            raise ValueError("a link of a chain of keys does not fit the one before")


@dataclass(eq=False)
class Chain:
    """Calls of which each continues the one before. `run`: that of the newest. `first`: the place in the whole sequence
    of its first key, where a window had left keys before anything was recorded."""

    links: list[Link]
    run: int = 0
    first: int = 0


class Cached(NamedTuple):
    """What one call had: a link of a chain."""

    chain: Chain
    number: int

    @property
    def link(self) -> Link:
        return self.chain.links[self.number]

    @property
    def shape(self) -> torch.Size:
        """(B, Hk, L, E)."""
        batch, heads, _, width = self.link.new.shape
        return torch.Size((batch, heads, self.link.length, width))

    @property
    def whole(self) -> bool:
        """Whether the tensor stands as it is, by itself."""
        return self.number == 0 and self.link.new.shape[2] == self.link.length

    def tensor(self) -> Tensor:
        """The tensor (B, Hk, L, E): put together from its chain, unless it is `whole`."""
        return self.link.new if self.whole else self.between(self.link.base, self.link.base + self.link.length)

    def between(self, first: int, last: int) -> Tensor:
        """What stood at these places, those too that a window had left before this call, (B, Hk, last − first, E)."""
        batch, heads, _, width = self.shape
        found = self.link.new.new_zeros(batch, heads, last - first, width)
        wanted = [(first, last)]
        for link, rows in self.before():
            left = []
            for low, high in wanted:
                start, stop = max(low, link.start), min(high, link.start + link.new.shape[2])
                if start >= stop:
                    left.append((low, high))
                    continue
                new = link.new[:, :, start - link.start : stop - link.start]
                found[:, :, start - first : stop - first] = new if rows is None else new[rows]
                left += [edges for edges in ((low, start), (stop, high)) if edges[0] < edges[1]]
            wanted = left
            if not wanted:
                break
        return found

    def before(self) -> list[tuple[Link, Tensor | None]]:
        """This link and those that it continues, newest first, each with which of its rows each row here continues."""
        found: list[tuple[Link, Tensor | None]] = []
        rows: Tensor | None = None
        for link in reversed(self.chain.links[: self.number + 1]):
            found.append((link, rows))
            parents = link.parents
            if parents is not None:
                rows = parents if rows is None else parents[rows]
        return found


def alone(tensor: Tensor, filled: int | None = None, query: int | None = None) -> Cached:
    """A tensor that continues no other, as it is."""
    length = tensor.shape[2]
    return Cached(Chain([Link(0, length, 0, tensor, length if filled is None else filled, query=query)]), 0)
