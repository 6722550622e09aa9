"""The memory of a `KeyValueCache`, and the positions that it holds of each sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.numbers import check_count
from clearhead.base.output.text import brief
from clearhead.base.torch_state.mode import CURRENT, Mode, any_thread_compiles, get_mode
from clearhead.base.torch_state.tensor_kind import is_readable
from clearhead.masks._read import own

Ends = tuple[int, ...]  # the length of each sequence, on the host


class Limits(NamedTuple):
    """The positions that a cache of fixed memory holds of each sequence.

    Attributes:
        capacity: The number of slots.
        window: How many of the last positions are held; they take turns in the slots after the `first` ones. None: all
            positions are held, each in the slot of its own number.
        first: How many of the first positions are held beside a window.
    """

    capacity: int
    window: int | None = None
    first: int = 0

    def find_slots(self, positions: Tensor, ends: Tensor) -> Tensor:
        """Return the slot of each position, (B, L); `capacity` for positions that are not held.

        `ends`: (B, 1), the length of each sequence.
        """
        kept, at = positions < ends, positions
        if self.window is not None:
            at = torch.where(positions < self.first, positions, self.first + (positions - self.first) % self.window)
            kept = kept & ((positions < self.first) | (positions >= ends - self.window))
        return torch.where(kept, at, self.capacity).clamp(max=self.capacity)

    def find_positions(self, ends: Tensor) -> Tensor:
        """Return the position in each slot, (B, capacity), −1 for none: the inverse of `find_slots`."""
        at = torch.arange(self.capacity, device=ends.device)
        if self.window is not None:
            last = ends - 1 - (ends - 1 - at) % self.window  # the last position that has this slot's turn
            at = torch.where(at < self.first, at, torch.where(last < self.first, -1, last))
        return torch.where(at < ends, at, -1)


def validate_limits(capacity: Any, window: Any, first: Any) -> Limits | None:
    """Return the limits that the arguments of `KeyValueCache` set; None for a cache that grows."""
    first = check_count(first, 0, "KeyValueCache: first")
    if (first and window is None) or not (capacity is None or window is None):
        raise ClearheadError(
            "KeyValueCache takes capacity=, or window= and with it first=, the numbers of the last and of the first "
            f"positions; got capacity={brief(capacity)}, window={brief(window)}, first={first}."
        )
    if window is not None:
        window = check_count(window, 1, "KeyValueCache: window")
        return Limits(window + first, window, first)
    return None if capacity is None else Limits(check_count(capacity, 1, "KeyValueCache: capacity"))


class KeyValueBuffer:
    """Memory for keys and values (B, Hk, slots, E). The last slot takes the keys that are not held.

    A buffer that grows is written through `.data`, which has a version counter of its own. No position of a view that
    was returned is written again, so the view's own counter shows only writes by others.

    Attributes:
        is_free: Whether no call has written beyond the positions of the state. A write makes another object of the same
            tensors for the next state, so a branch, or a call after a failed one, reads False. It is a bool, and no
            count of writes, because compiled code takes a number that changes as an input, or makes a graph for each.
        is_compiled: Whether compiled code writes to the tensors, so that their writes are counted.
        overwritten: Keys, values and slots that the newest key of a window has replaced, until its call has succeeded.
    """

    overwritten: tuple[Tensor, Tensor, Tensor] | None

    def __init__(self, keys: Tensor, values: Tensor, is_free: bool = False, mode: Mode = CURRENT) -> None:
        self.keys, self.values, self.is_free = keys, values, is_free
        self.is_compiled = mode.compiled
        self.overwritten = None  # set here: compiled code tells an object that gets an attribute later from this one

    @classmethod
    def make_empty(cls, key: Tensor, value: Tensor, slots: int, mode: Mode) -> KeyValueBuffer:
        """Make an empty buffer for keys and values of these shapes."""
        # a tensor of inference mode could not be written to outside it, nor tell of writes; compiled code takes none
        with torch.inference_mode(False):
            both = [t.new_zeros(t.shape[0], t.shape[1], slots, t.shape[3]) for t in (key, value)]
        return cls(both[0], both[1], True, mode)

    def write(self, at: Any, key: Tensor, value: Tensor, counted: bool = True) -> None:
        """Write keys and values (B, Hk, L, E) from the slot `at` on, or to the slots `at`, (B, L)."""
        keys, values = (self.keys, self.values) if counted else (self.keys.data, self.values.data)
        with torch.no_grad():
            if isinstance(at, Tensor) and key.shape[2] == 1:  # as below, at less cost
                slots = at[:, None, :, None]
                keys.scatter_(2, slots.expand(key.shape), key)
                values.scatter_(2, slots.expand(value.shape), value)
            elif isinstance(at, Tensor):
                rows = torch.arange(at.shape[0], device=at.device)[:, None]
                keys[rows, :, at], values[rows, :, at] = key.transpose(1, 2), value.transpose(1, 2)
            else:
                stop = at + key.shape[2]
                keys[:, :, at:stop], values[:, :, at:stop] = key, value

    def restore_overwritten(self) -> None:
        """Write back what a call that failed has replaced: `crop` may go back to it."""
        if self.overwritten is not None:
            key, value, slots = self.overwritten
            self.write(slots, key, value)
            self.overwritten = None


class CacheState(NamedTuple):
    """The positions that a cache holds. Each call makes another state, which may share the buffer.

    Attributes:
        buffer: The memory of the keys and values.
        limits: None for a buffer that grows: then `longest` is always known, and `lengths` are on the host. With
            limits compiled code reads `lengths` alone, because a number that changes makes a graph for each step.
        longest: The length of the longest sequence; None where compiled code has counted it in `lengths`.
        lengths: (B,), the length of each sequence, with limits on the device of the keys; None: all are equal.
        ends: `lengths` on the host, where eager code has counted that they differ.
    """

    buffer: KeyValueBuffer
    limits: Limits | None
    longest: int | None
    lengths: Tensor | None = None
    ends: Ends | None = None

    @property
    def key(self) -> Tensor:
        return self.buffer.keys[:, :, : self.longest if self.limits is None else -1]

    @property
    def value(self) -> Tensor:
        return self.buffer.values[:, :, : self.longest if self.limits is None else -1]

    @property
    def length(self) -> int:
        return max(self.list_lengths(), default=0) if self.longest is None else self.longest

    @property
    def past(self) -> int | Tensor:
        """The position of the next key: a number, or (B,) where the sequences may differ."""
        if self.limits is None:
            are_equal = self.lengths is None
        else:
            is_compiled = any_thread_compiles() and get_mode().compiled
            are_equal = not is_compiled and self.longest is not None and self.ends is None
        found = self.longest if are_equal else self.lengths
        assert found is not None
        return found

    def list_lengths(self) -> Ends:
        """Return the length of each sequence."""
        if self.lengths is not None:
            return tuple(self.lengths.tolist())
        return (self.length,) * self.buffer.keys.shape[0]

    def read_lengths(self) -> Tensor:
        """Return the length of each sequence, (B,), on the host."""
        if self.lengths is not None:
            return self.lengths.cpu()
        return torch.full((self.buffer.keys.shape[0],), self.length, dtype=torch.int64, device="cpu")

    def advance(
        self, size: int, counts: Tensor | None, eager: bool
    ) -> tuple[Tensor | None, Tensor | None, int | None, Ends | None]:
        """Count `size` new positions, or `counts` of each sequence, (B,).

        Returns:
            The first new position of each sequence, (B,), or None where it is the same for all; then `lengths`,
            `longest` and `ends` of the next state.
        """
        if self.limits is None and self.lengths is None and counts is None:
            assert self.longest is not None
            return None, None, self.longest + size, None
        starts = self.read_lengths() if self.lengths is None else self.lengths
        with torch.inference_mode(False):  # compiled code takes no tensor of that mode
            stops = starts + (size if counts is None else counts)
        if self.limits is not None and (self.limits.window is not None or not eager):
            return starts, stops, None, None
        if counts is None and self.longest is not None:
            if eager and self.ends is not None:
                return starts, stops, self.longest + size, tuple(map(size.__add__, self.ends))
            return None if self.limits is not None else starts, stops, self.longest + size, None
        if self.limits is not None and not is_readable(stops):
            return starts, stops, None, None
        return starts, stops, *_find_longest(stops.tolist())  # a cache that grows needs it: compiled code reads it too

    def clone(self) -> CacheState:
        """Copy the state into memory that can be written to in inference mode and outside it."""
        lengths = None if self.lengths is None else own(self.lengths)
        return self._replace(buffer=KeyValueBuffer(own(self.buffer.keys), own(self.buffer.values)), lengths=lengths)

    def crop(self, lengths: Tensor) -> CacheState:
        """Return the state of the first `lengths` positions of each sequence, (B,), on the host."""
        starts = self.read_lengths()
        if lengths.numel() and torch.equal(lengths, starts):
            return self
        longest, ends = _find_longest(lengths.tolist())
        if self.limits is None:
            buffer, each = KeyValueBuffer(self.buffer.keys, self.buffer.values), None if ends is None else lengths
            return CacheState(buffer, None, longest, each, ends)
        if self.limits.window is not None and bool(((lengths < starts) & (starts > self.limits.capacity)).any()):
            raise ClearheadError(
                f"crop: sequences of {tuple(starts.tolist())} positions have left the {self.limits.capacity} slots of "
                "this cache, which has a window.\nCrop a copy that was made before: copy.copy(cache)."
            )
        with torch.inference_mode(False):
            return CacheState(self.buffer, self.limits, longest, lengths.to(self.buffer.keys.device), ends)

    def select(self, at: Tensor) -> CacheState:
        """Return the state of these entries of the batch; with limits as many entries stay in the same memory."""
        if self.limits is None:
            keys, values = self.key.index_select(0, at), self.value.index_select(0, at)
            state = CacheState(KeyValueBuffer(keys, values), None, self.longest)
            return state if self.lengths is None else state.crop(self.lengths[at.cpu()])
        assert self.lengths is not None
        keys, values = (t.index_select(0, at) for t in (self.buffer.keys, self.buffer.values))
        longest, ends = self.longest, self.ends
        if ends is not None:
            longest, ends = _find_longest([ends[n] for n in at.tolist()])
        with torch.inference_mode(False):
            state = self._replace(longest=longest, lengths=self.lengths.index_select(0, at), ends=ends)
            if keys.shape != self.buffer.keys.shape:
                return state._replace(buffer=KeyValueBuffer(keys.clone(), values.clone()))
        self.buffer.keys.copy_(keys)
        self.buffer.values.copy_(values)
        return state


def _find_longest(lengths: list[int]) -> tuple[int, Ends | None]:
    """Return the largest length, and the lengths, or None where all are equal."""
    longest = max(lengths, default=0)
    return longest, tuple(lengths) if min(lengths, default=0) < longest else None
