"""The keys, or the values, of a generation's calls, each kept once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Link(NamedTuple):
    """The keys of one call (B, Hk, L, E), as its difference from the call before it in its chain.

    Places count from the chain's first key on. This call had `length` keys, from the place `base` on, which grows where
    a window moves. `new` (B, Hk, n, E) stands at the places from `start` on; before and after it stand the keys of the
    call before, and zeros at places that had no key, as in a static cache. `rows`, bool (B, rows before): which rows of
    the call before each row may continue, as beams do; None: its own. The layers of a run share `rows`: beams with the
    same tokens in a window have the same keys there, and may differ in another layer. `filled`: the place after the
    last key in use. `query`: the place of the call's first query; in cross attention, by the self attention before it;
    None: unknown. `rejected`: how many of the call's last tokens were dropped from the cache after it, such as drafts.
    """

    base: int
    length: int
    start: int
    new: Tensor
    filled: int
    rows: Tensor | None = None
    query: int | None = None
    rejected: int = 0

    @property
    def parents(self) -> Tensor | None:
        """Which row of the call before each row continues, int64 (B,); None: its own."""
        rows = self.rows
        if rows is None or (rows.shape[0] == rows.shape[1] and bool(rows.diagonal().all())):
            return None
        return rows.int().argmax(1)

    def validate(self, before: Link | None, name: str) -> None:
        """Raise a ValueError where this link cannot follow `before`: a file may hold any sizes of 0 or more."""
        new, rows, first = self.new, self.rows, self if before is None else before
        stop, last, count = self.start + new.shape[2], self.base + self.length, first.new.shape[0]
        fits = new.dtype == first.new.dtype and new.shape[1::2] == first.new.shape[1::2]
        fits = fits and self.base <= self.start and stop <= last and self.base <= self.filled <= last
        # each place up to `filled` has a key in this link or before
        fits = fits and self.start <= (0 if before is None else before.filled)
        fits = fits and (stop == self.filled or (self.start == self.base and stop == last))
        if rows is None:
            fits = fits and new.shape[0] == count
        else:
            fits = fits and before is not None and rows.shape == (new.shape[0], count) and bool(rows.any(1).all())
        if not fits:
            raise ValueError(f"{name} does not fit the link before it in the chain of keys")


@dataclass(eq=False)
class Chain:
    """The links of calls of which each continues the one before.

    `run`: the run of the newest call. `first`: the place of the chain's first key in the whole sequence, where a window
    had dropped keys before the first recorded call.
    """

    links: list[Link]
    run: int = 0
    first: int = 0
    _appended: tuple[int, bool] = (0, False)

    def has(self, cached: Cached) -> bool:
        """Whether a call's link is one of this chain, which may have begun as a branch of the call's own chain."""
        return cached.number < len(self.links) and self.links[cached.number].new is cached.link.new

    @property
    def appended(self) -> bool:
        """Whether there are several links, and each adds keys of the same rows behind all keys of the link before."""
        if self._appended[0] != len(self.links):
            whole = all(one.base == 0 and one.length == one.filled and one.parents is None for one in self.links)
            behind = all(later.start == one.filled for one, later in pairwise(self.links))
            self._appended = len(self.links), whole and behind and len(self.links) > 1 and not self.first
        return self._appended[1]


class Cached(NamedTuple):
    """The keys, or the values, of one call: a link of a chain."""

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
        """Whether the link holds the whole tensor."""
        return self.number == 0 and self.link.new.shape[2] == self.link.length

    def tensor(self) -> Tensor:
        """The tensor (B, Hk, L, E): put together from its chain, unless it is `whole`."""
        return self.link.new if self.whole else self.between(self.link.base, self.link.base + self.link.length)

    def between(self, first: int, last: int) -> Tensor:
        """The keys at these places, (B, Hk, last − first, E), with those that a window had dropped before this call."""
        batch, heads, _, width = self.shape
        found = self.link.new.new_zeros(batch, heads, last - first, width)
        for link, rows in reversed(self.before()):  # newer keys take the places of older ones
            start, stop = max(first, link.start), min(last, link.start + link.new.shape[2])
            if start < stop:
                new = link.new[:, :, start - link.start : stop - link.start]
                found[:, :, start - first : stop - first] = new if rows is None else new[rows]
        return found

    def before(self) -> list[tuple[Link, Tensor | None]]:
        """This link and the links that it continues, newest first, each with the number of its row that each row here
        continues, int64 (B,); None: the same row."""
        found: list[tuple[Link, Tensor | None]] = []
        rows: Tensor | None = None
        for link in reversed(self.chain.links[: self.number + 1]):
            found.append((link, rows))
            parents = link.parents
            if parents is not None:
                rows = parents if rows is None else parents[rows]
        return found


def alone(tensor: Tensor) -> Cached:
    """A chain of one tensor, which continues no other."""
    length = tensor.shape[2]
    return Cached(Chain([Link(0, length, 0, tensor, length)]), 0)
