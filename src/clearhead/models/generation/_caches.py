"""What of a call's keys is new, found by comparing them with those of the call before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.base.tracing import readable
from clearhead.models._modules import Kind
from clearhead.models.generation._cached import Cached, Chain, Link, alone
from clearhead.problem.record import copied

SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MOST = 8  # how many places are tried for a window that has moved by an unknown number of keys


class Call(NamedTuple):
    """What says how a call may continue another. `filled`: how many of its keys are in use.

    `joins`: whether it may; not where the record has what was projected from the key, and not the key.
    """

    kind: Kind
    run: int
    queries: int
    filled: int
    joins: bool = True


class Caches:
    """The newest chain of each module, and its newest tensor in full, to compare the next one with."""

    def __init__(self, every: int) -> None:
        self._every = every  # how many runs of the model there are to one that is recorded
        self._newest: dict[tuple[str, int, str], _Newest] = {}
        self._turns: dict[str, tuple[int, int]] = {}
        self._began = -1  # the newest run in which a sequence began
        self._self: tuple[int, _Newest | None] = -1, None  # a run, and its newest self attention
        self._lock = threading.Lock()

    def add(
        self, name: str, call: Call, key: Tensor, value: Tensor | None, fresh: bool = False
    ) -> tuple[Cached, Cached | None]:
        """A call's key and value (B, Hk, Lk, E), copied as far as they are new.

        `fresh`: the key is a copy already.
        """
        with self._lock, torch.inference_mode(False):  # what is kept is written to, and used, outside of it too
            run, turn = self._turns.get(name, (-1, 0))
            turn = turn + 1 if run == call.run else 0  # a module may call attention several times
            self._turns[name] = call.run, turn
            keys = self._add((name, turn, "key"), call, key.detach(), fresh)
            if call.kind == "self":
                self._self = call.run, self._newest[name, turn, "key"]
                self._began = call.run if keys.number == 0 else self._began
            return keys, None if value is None else self._add((name, turn, "value"), call, value.detach(), fresh=False)

    def _add(self, which: tuple[str, int, str], call: Call, tensor: Tensor, fresh: bool) -> Cached:
        newest = self._newest.get(which)
        link = None
        if newest is not None and self._may_continue(newest, call, tensor):
            link = newest.link(call, tensor, self._beside(call))
            link = None if link is None else link._replace(query=self._place(call, link.filled))
        if link is None:
            newest = self._newest[which] = _Newest(first(call, tensor, fresh, self._place(call, 0)), call.run, tensor)
        else:
            assert newest is not None
            newest.follow(link, call.run, tensor)
        return Cached(newest.chain, len(newest.chain.links) - 1)

    def _place(self, call: Call, filled: int) -> int | None:
        """The place of a call's first query. `filled`: where its keys end."""
        if call.kind == "self":
            return max(filled or call.filled, call.queries) - call.queries
        beside = self._beside(call)
        return None if beside is None else beside.last.query

    def _beside(self, call: Call) -> _Newest | None:
        """The self attention that came before a cross attention in the same run."""
        return self._self[1] if call.kind == "cross" and self._self[0] == call.run else None

    def _may_continue(self, newest: _Newest, call: Call, tensor: Tensor) -> bool:
        if not call.joins or not comparable(tensor) or not newest.alike(tensor):
            return False
        if call.kind == "self":
            return call.filled > call.queries  # else its first query is at its first key: another sequence
        # the same source may be read in another sequence's steps
        return self._began < call.run <= newest.chain.run + self._every


def comparable(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout == torch.strided and readable(tensor) and tensor.numel() > 0


def first(call: Call, tensor: Tensor, fresh: bool, query: int | None) -> Cached:
    """The first of a chain; of the empty slots of a static cache nothing is kept."""
    length, filled = tensor.shape[2], call.filled
    if call.joins and filled < length and comparable(tensor) and not bool(bits(tensor[:, :, filled:]).any()):
        return Cached(Chain([Link(0, length, 0, copied(tensor[:, :, :filled]), filled, query=query)]), 0)
    return alone(tensor if fresh else copied(tensor), filled, query)


class _Newest:
    """The newest link of a chain, and all that its call had.

    That is the model's own tensor, which a cache that grows leaves as it was, and has just read; or, where it is
    written to, as a static cache is, a copy.
    """

    def __init__(self, cached: Cached, run: int, tensor: Tensor) -> None:
        self.chain = cached.chain
        self.chain.run = run
        self.parents: list[list[int]] | None = None  # of each row of the newest, those that it may continue
        self._given: tuple[Tensor, int] | None = None  # the model's own, and how often it had been written to
        self._room: Tensor | None = None  # a copy, which has the newest from `_at` on, and room for more
        self._at = 0
        self._hold(tensor)

    @property
    def last(self) -> Link:
        return self.chain.links[-1]

    def alike(self, tensor: Tensor) -> bool:
        """Whether the two have the same kind of entries: only rows and length may differ."""
        mine, other = self.last.new, tensor
        shapes = [(t.shape[1], t.shape[3], t.dtype, t.device) for t in (mine, other)]
        return type(mine) is Tensor and shapes[0] == shapes[1]

    def _hold(self, tensor: Tensor) -> None:
        self._given = None if tensor.is_inference() else (tensor, tensor._version)

    def _mine(self, tensor: Tensor) -> Tensor:
        """All that the newest call had. `tensor`: what the next one has, perhaps in the same memory."""
        if self._room is None and self._given is not None:
            mine, version = self._given
            if mine._version == version and mine.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
                return mine
        if self._room is None:
            self._room, self._given = Cached(self.chain, len(self.chain.links) - 1).tensor(), None
        return self._room[:, :, self._at : self._at + self.last.length]

    def link(self, call: Call, tensor: Tensor, beside: _Newest | None) -> Link | None:
        """What is new in a tensor that continues the newest; None where it does not. `beside`: see `Caches._beside`."""
        last, length = self.last, tensor.shape[2]
        mine = self._mine(tensor)
        end = length if call.kind == "self" else 0
        for offset, filled in self._places(call, mine, tensor):
            old = min(filled - call.queries if end else length, last.filled - last.base - offset)
            if old <= 0:
                continue
            pairs = [((0, old), offset)]
            if filled < length:
                pairs.append(((filled, length), 0))
            # beams read one source: that their keys are the same does not say which row continues which
            found = _continued(mine, tensor, pairs, None if beside is None else beside.parents)
            if found is not None:
                self.parents = found
                rows = [every[0] for every in found]
                base = last.base + offset
                new = copied(tensor[:, :, old:filled])
                moved = None if rows == list(range(mine.shape[0])) else torch.tensor(rows, device=tensor.device)
                return Link(base, length, base + old, new, base + filled, moved)
        return None

    def _places(self, call: Call, mine: Tensor, tensor: Tensor) -> Iterator[tuple[int, int]]:
        """Where its first key may stand in the newest one, and how many of its slots would then be in use."""
        before, length = mine.shape[2], tensor.shape[2]
        if call.kind == "cross":
            if before == length:
                yield 0, length
            return
        if before == length and call.filled < length:
            yield 0, call.filled  # a static cache: a slot in the middle is filled
        old = length - call.queries
        tried = {max(before - old, 0), 0}
        for offset in sorted(tried, reverse=True):
            yield offset, length  # it has grown, and a window has left the first ones; or the last ones were rejected
        found = (bits(mine) == bits(tensor[:1, :, :1])).all(-1).all(1).any(0).nonzero().flatten()
        for offset in found[:MOST].tolist():
            if offset not in tried:
                yield offset, length

    def follow(self, link: Link, run: int, tensor: Tensor) -> None:
        """Add a link, and keep all that its call had."""
        last, self.chain.run = self.last, run
        self.chain.links.append(link)
        if self._room is None:
            self._hold(tensor)
            return
        at = self._at + link.base - last.base
        first, stop = link.start - link.base, link.start - link.base + link.new.shape[2]
        shared = self._room is self.chain.links[0].new
        if shared or link.rows is not None or at + link.length > self._room.shape[2]:
            old = self._room[:, :, at : self._at + last.length][:, :, : link.length]
            old = old if link.rows is None else old[link.rows]
            batch, heads, had, width = old.shape
            room = old.new_empty(batch, heads, link.length + link.length // 4 + 16, width)
            room[:, :, :had] = old
            self._room, at = room, 0
        self._room[:, :, at + first : at + stop] = link.new
        self._at = at


def _continued(
    mine: Tensor, tensor: Tensor, pairs: list[tuple[tuple[int, int], int]], among: list[list[int]] | None
) -> list[list[int]] | None:
    """For each row of a tensor the rows of `mine` that it may continue; None where one continues none.

    `pairs`: places of the tensor, and how much further on the same stand in `mine`. `among`: of each row, the rows that
    are asked of; else its own alone where that is so for all of them, and all.
    """

    def same(row: slice, of: slice) -> bool:
        return all(
            equal(tensor[row, :, low:high], mine[of, :, low + offset : high + offset]) for (low, high), offset in pairs
        )

    count, rows = mine.shape[0], tensor.shape[0]
    own = [[row] for row in range(rows)]
    if count == rows and among in (None, own) and same(slice(None), slice(None)):
        return own
    if count == rows == 1:
        return None
    (_, high), offset = pairs[0]
    last, of_mine = (bits(t)[:, :, place - 1] for t, place in ((tensor, high), (mine, high + offset)))
    alike = (last[:, None] == of_mine[None]).all(-1).all(-1).tolist()  # most that differ do so there
    found = []
    for row in range(rows):
        asked = range(count) if among is None or row >= len(among) else among[row]
        parents = [of for of in asked if alike[row][of] and same(slice(row, row + 1), slice(of, of + 1))]
        if not parents:
            return None
        found.append(parents)
    return found


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers: a NaN is equal to itself then."""
    return tensor.view(SAME_SIZE[tensor.element_size()])


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors (B, Hk, L, E), with L > 0, are the same, bit by bit."""
    if one.shape != other.shape:
        return False
    one, other = bits(one), bits(other)
    if not one.is_cpu:
        return torch.equal(one, other)
    mine, theirs = one.numpy(), other.numpy()  # three times as fast as torch.equal
    if len(mine) > 1 and not (mine[:, :, -1] == theirs[:, :, -1]).all():
        return False  # soon found: beams that differ do so there
    if mine.shape[3] * mine.itemsize % 8 == 0 and mine.strides[3] == theirs.strides[3] == mine.itemsize:
        mine, theirs = mine.view(np.int64), theirs.view(np.int64)
    return bool((mine == theirs).all())
