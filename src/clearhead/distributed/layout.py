"""Which rank of a group holds which positions of a sequence."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.numbers import check_count
from clearhead.base.shapes import Sizes
from clearhead.base.torch_state.contexts import disable_compiler, without_autocast
from clearhead.masks.base import Mask
from clearhead.problem.visible import intervals_of, resolve

LAYOUTS = 1024  # how many of the latest layouts are remembered
Group = Any  # a ProcessGroup, a DeviceMesh of one dimension, a number of ranks, or None for all

_count = itertools.count()
_first: WeakValueDictionary[Any, Layout] = WeakValueDictionary()  # by type, chunks and group
_numbered: WeakValueDictionary[int, Layout] = WeakValueDictionary()
_last: deque[Layout] = deque(maxlen=LAYOUTS)  # a backward pass may run when its layout is no longer held elsewhere


class Layout:
    """Which rank holds which positions of a sequence: a value, the same on every rank.

    >>> import torch, clearhead as ch
    >>> layout = ch.distributed.ZigZag(8, 2)  # of two ranks; this process is the first
    >>> layout.chunks
    ((range(0, 2), range(6, 8)), (range(2, 4), range(4, 6)))
    >>> layout.positions(rank=1)
    tensor([2, 3, 4, 5])
    >>> layout.shard(torch.arange(8.0), dim=0, rank=0)
    tensor([0., 1., 6., 7.])

    `chunks`: for each rank the ranges of its positions, ascending. All ranges together hold 0 … length − 1, each once.
    A rank may hold no position. `group`: a process group, a `DeviceMesh` of one dimension, None for all processes; or a
    number of ranks, for arithmetic without processes (`plan`), where this process counts as the first. Raises a
    `ClearheadError` for chunks that overlap or leave out a position, and unless there is one tuple for each rank.
    """

    def __init__(self, chunks: Iterable[Iterable[range]], group: Group = None) -> None:
        self.group, self.rank, self.ranks = members(group)
        self.members = not isinstance(group, int)  # whether its ranks are processes
        self.chunks = _ranges(chunks)
        if len(self.chunks) != self.ranks:
            raise ClearheadError(f"chunks are of {len(self.chunks)} ranks, and the group has {self.ranks}.")
        every = sorted(itertools.chain(*self.chunks), key=lambda c: c.start)
        ends = [0, *(c.stop for c in every)]
        is_ascending = all(a.start < b.start for own in self.chunks for a, b in itertools.pairwise(own))
        if not is_ascending or [c.start for c in every] != ends[:-1]:
            raise ClearheadError(
                "chunks must hold each position once, from 0 on, those of a rank ascending; they are "
                f"{self.chunks!r:.120}."
            )
        self.length: int = ends[-1]
        self.held = self.count()  # by this rank; compiled code reads this number, and no ranges
        self.number, self._alike = _number(self)

    def own(self, rank: int | None = None) -> tuple[range, ...]:
        """The chunks of a rank, by default of this one."""
        return self.chunks[self.rank if rank is None else check_count(rank, 0, "rank", self.ranks - 1)]

    def count(self, rank: int | None = None) -> int:
        """How many positions a rank holds."""
        return sum(map(len, self.own(rank)))

    def positions(self, device: torch.device | str | int | None = None, rank: int | None = None) -> Tensor:
        """The positions that a rank holds, (n,), int64: the position ids of its part of a sequence."""
        parts = [torch.arange(c.start, c.stop, dtype=torch.int64, device=device) for c in self.own(rank)]
        return torch.cat([torch.empty(0, dtype=torch.int64, device=device), *parts])

    def shard(self, tensor: Tensor, dim: int, rank: int | None = None) -> Tensor:
        """The part of `tensor`, which has all positions along `dim`, that a rank holds. Differentiable."""
        dim = check_count(dim, -tensor.ndim, "dim", tensor.ndim - 1)
        if tensor.shape[dim] != self.length:
            raise ShapeError(
                f"dimension {dim} of a tensor {tuple(tensor.shape)} has {tensor.shape[dim]} positions, and the layout "
                f"is of {self.length}: pass the whole sequence."
            )
        parts = [tensor.narrow(dim, c.start, len(c)) for c in self.own(rank)]
        with without_autocast(tensor.device):  # which refuses some dtypes
            return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)

    def __repr__(self) -> str:
        counts = [self.count(rank) for rank in range(self.ranks)]
        return f"{type(self).__name__}({self.length} positions on {self.ranks} ranks: {counts!r:.60})"


class Contiguous(Layout):
    """Rank 0 holds the first positions, rank 1 the next ones: for windows, and for lengths that you choose.

    >>> import clearhead as ch
    >>> ch.distributed.Contiguous([3, 0, 5], 3).chunks
    ((range(0, 3),), (), (range(3, 8),))

    `lengths`: how many positions each rank holds, or the length of the sequence, which is then shared out evenly.
    """

    def __init__(self, lengths: int | Sequence[int], group: Group = None) -> None:
        ranks = members(group)[2]
        if not isinstance(lengths, Iterable):
            ends = _even(check_count(lengths, 0, "length"), ranks)
        else:
            ends = [0, *itertools.accumulate(check_count(n, 0, "a length") for n in lengths)]
        super().__init__([[range(a, b)] for a, b in itertools.pairwise(ends)], group)


class ZigZag(Layout):
    """The sequence in 2 · ranks parts, of which each rank holds one from the front and its mirror image: for `Causal`.

    >>> import clearhead as ch
    >>> ch.distributed.ZigZag(12, 3).chunks
    ((range(0, 2), range(10, 12)), (range(2, 4), range(8, 10)), (range(4, 6), range(6, 8)))

    Late queries see more keys than early queries, so all ranks have about the same number of pairs.
    Source: Zhu 2024, "ring-flash-attention"; Llama Team 2024, "The Llama 3 Herd of Models", section 3.3.2.
    """

    def __init__(self, length: int, group: Group = None) -> None:
        ranks = members(group)[2]
        parts = [range(a, b) for a, b in itertools.pairwise(_even(check_count(length, 0, "length"), 2 * ranks))]
        super().__init__([[parts[r], parts[-1 - r]] for r in range(ranks)], group)


class Balanced(Layout):
    """Contiguous parts with about the same number of allowed pairs each: for packed documents.

    >>> import clearhead as ch
    >>> documents = ch.Documents([0, 0, 0, 0, 1, 1, 2, 3])
    >>> ch.distributed.Balanced(documents & ch.Causal(), 8, 2).chunks
    ((range(0, 4),), (range(4, 8),))

    `mask`: as for `attention`; the pairs of its intervals are counted. `batch`: the number of sequences of the mask.
    Ranks may hold different numbers of positions.
    """

    def __init__(self, mask: Mask, length: int, group: Group = None, *, batch: int = 1) -> None:
        ranks, batch = members(group)[2], check_count(batch, 0, "batch")
        if not isinstance(mask, Mask):
            raise ClearheadError(f"Balanced takes a Mask, such as Documents(ids), not {mask!r:.60}.")
        length = check_count(length, 0, "length")
        start, stop = intervals_of(resolve(mask, Sizes(batch, 1, length, length), as_written=False))
        seen = np.maximum(stop - start, 0).sum(-1)  # (B or 1, H or 1, Lq or 1)
        rows = np.broadcast_to(seen, (*seen.shape[:2], length)).sum((0, 1)) + 1  # a row has a cost of its own
        total = np.concatenate([[0], np.cumsum(rows)])
        ends = np.searchsorted(total, [int(total[-1]) * part // ranks for part in range(ranks + 1)])
        super().__init__([[range(int(a), int(b))] for a, b in itertools.pairwise(ends)], group)


def check_layout(layout: Any, of_processes: bool = True) -> None:
    """Raise an error unless `layout` is a layout, `of_processes` or of any ranks."""
    if not isinstance(layout, Layout):
        raise ClearheadError(f"layout is {layout!r:.60}; pass a Layout, such as ZigZag(length, group).")
    if of_processes and not layout.members:
        raise ClearheadError(
            f"{layout} was made for {layout.ranks} ranks without a process group, for arithmetic: pass it to plan(), "
            "or make it with the group of the processes."
        )


def by_number(number: int) -> Layout:
    """The layout with this number. Compiled code holds the number of a layout."""
    return _numbered[number]


@disable_compiler  # compiled code must find the layout when it runs
def _number(layout: Layout) -> tuple[int, Layout | None]:
    """The number of equal layouts of one group, and the first of them, which is kept while one of them is in use."""
    value = type(layout), layout.chunks, layout.group, layout.members
    first = _first.setdefault(value, layout)
    _last.append(first)
    if first is not layout:
        return first.number, first
    number = next(_count)
    _numbered[number] = layout
    return number, None


def _ranges(chunks: Any) -> tuple[tuple[range, ...], ...]:
    """The chunks of each rank, without empty ones."""
    try:
        found = tuple(tuple(own) for own in chunks)
    except TypeError:
        found = ((None,),)
    if not all(isinstance(c, range) and c.step == 1 for own in found for c in own):
        raise ClearheadError(
            f"chunks is {chunks!r:.120}; expected for each rank the ranges of its positions, of step 1, such as "
            "[[range(0, 2), range(6, 8)], [range(2, 6)]]."
        )
    return tuple(tuple(c for c in own if len(c)) for own in found)


def _even(length: int, parts: int) -> list[int]:
    return [length * part // parts for part in range(parts + 1)]


def members(group: Group) -> tuple[Any, int, int]:
    """The process group, the rank in it, and the number of its ranks."""
    if isinstance(group, int) and group != dist.GroupMember.NON_GROUP_MEMBER:
        return None, 0, check_count(group, 1, "group, a number of ranks,")
    if hasattr(group, "get_group"):  # a device mesh
        if group.ndim != 1:
            raise ClearheadError(f"group is a mesh of {group.ndim} dimensions; pass one of its dimensions, mesh['cp'].")
        group = group.get_group()
    if not dist.is_available() or not dist.is_initialized():
        raise ClearheadError(
            "there is no process group: call torch.distributed.init_process_group() first (torchrun sets what it "
            "needs), or pass a number of ranks for arithmetic alone."
        )
    if group is not None and not isinstance(group, dist.ProcessGroup | int):
        raise ClearheadError(
            f"group is {group!r:.60}; expected a process group, a DeviceMesh of one dimension, a number of ranks, or "
            "None for all processes."
        )
    if isinstance(group, int) or dist.get_rank(group) < 0:  # new_group() gives others a number
        raise ClearheadError("this process is no member of the group.")
    return group, dist.get_rank(group), dist.get_world_size(group)
