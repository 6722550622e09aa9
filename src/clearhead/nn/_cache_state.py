"""The memory of a `KeyValueCache`, the positions that each sequence holds in it, and the step of a call."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError, ShapeError, UnsupportedError
from clearhead.base.mode import CURRENT, Mode, get_mode
from clearhead.base.numbers import check_count
from clearhead.base.positions import FAR
from clearhead.base.shapes import Sizes, moved, placed
from clearhead.base.text import brief
from clearhead.base.tracing import ensure, readable
from clearhead.masks._read import check_lengths, own
from clearhead.masks.base import Mask, all_keys, leaves
from clearhead.masks.causal import Causal
from clearhead.masks.first_keys import FirstKeys
from clearhead.masks.lengths import Lengths
from clearhead.masks.prefix_lm import PrefixLM
from clearhead.masks.sliding_window import SlidingWindow
from clearhead.problem.held_keys import HeldKeys
from clearhead.problem.lengths import with_lengths
from clearhead.scores.base import Score

LEAST = 16  # the positions of the first buffer
ENDLESS = (Causal, SlidingWindow, FirstKeys, Lengths, PrefixLM)  # masks whose intervals do not need the number of keys
Ends = tuple[int, ...]  # the length of each sequence, on the host


class Limits(NamedTuple):
    """What a cache keeps of each sequence: positions up to `capacity`, each at the slot of its own number; or, with a
    `window`, the `first` positions, and the last ones, which take turns in the `window` slots after these."""

    capacity: int
    window: int | None = None
    first: int = 0

    def find_slots(self, positions: Tensor, ends: Tensor) -> Tensor:
        """The slot of each position, (B, L), of sequences that end before `ends`, (B, 1). The slot `capacity` is for
        positions that are not kept."""
        kept, at = positions < ends, positions
        if self.window is not None:
            at = torch.where(positions < self.first, positions, self.first + (positions - self.first) % self.window)
            kept = kept & ((positions < self.first) | (positions >= ends - self.window))
        return torch.where(kept, at, self.capacity).clamp(max=self.capacity)

    def find_positions(self, ends: Tensor) -> Tensor:
        """The position that each slot holds, (B, capacity), of sequences that end before `ends`, (B, 1); −1 for none.

        The inverse of `find_slots`.
        """
        at = torch.arange(self.capacity, device=ends.device)
        if self.window is not None:
            last = ends - 1 - (ends - 1 - at) % self.window  # the last position that has this slot's turn
            at = torch.where(at < self.first, at, torch.where(last < self.first, -1, last))
        return torch.where(at < ends, at, -1)


def check_limits(capacity: Any, window: Any, first: Any) -> Limits | None:
    """What a cache keeps of each sequence; None for one that grows."""
    first = check_count(first, 0, "KeyValueCache: first")
    if window is not None:
        window = check_count(window, 1, "KeyValueCache: window")
        if capacity is not None:
            raise ClearheadError(
                f"KeyValueCache: capacity is {brief(capacity)} beside window={window}; a window of {window} positions "
                f"and the first {first} need {window + first} slots: leave capacity out."
            )
        return Limits(window + first, window, first)
    if first:
        raise ClearheadError(
            f"KeyValueCache: first is {first} without a window: the first positions are kept beside the last ones. "
            f"Pass KeyValueCache(window=256, first={first})."
        )
    return None if capacity is None else Limits(check_count(capacity, 1, "KeyValueCache: capacity"))


class KeyValueBuffer:
    """Memory for keys and values (B, Hk, slots, E). The last slot holds no position: keys that are not kept go there.

    A buffer that grows is written to through `.data`, which has a version counter of its own. Positions that a sequence
    has in a view given out are never written again, so the view's own counter tells only of writes by others. `free`:
    whether no call has written beyond the positions of the state; a write makes another object of the same tensors for
    the state after it, so that a branch, or a call after a failed one, finds False. This is a bool, and no count of
    writes, because a number that changes from step to step is an input of compiled code, or makes a graph for each
    step. `compiled`: whether compiled code writes to the tensors, whose writes are counted.
    """

    def __init__(self, keys: Tensor, values: Tensor, free: bool = False, mode: Mode = CURRENT) -> None:
        self.keys, self.values, self.free = keys, values, free
        self.compiled = mode.compiled

    @classmethod
    def empty(cls, key: Tensor, value: Tensor, slots: int, mode: Mode) -> KeyValueBuffer:
        """An empty buffer of so many slots, for keys and values of these shapes."""
        # a tensor of inference mode could not be written to outside it, nor tell of writes; compiled code takes none
        with torch.inference_mode(False):
            both = [t.new_zeros(t.shape[0], t.shape[1], slots, t.shape[3]) for t in (key, value)]
        return cls(both[0], both[1], True, mode)

    def write(self, at: Any, key: Tensor, value: Tensor, counted: bool = True) -> None:
        """Write keys and values (B, Hk, L, E) from the slot `at` on, or to slots (B, L)."""
        keys, values = (self.keys, self.values) if counted else (self.keys.data, self.values.data)
        with torch.no_grad():
            if isinstance(at, Tensor):
                rows = torch.arange(at.shape[0], device=at.device)[:, None]
                keys[rows, :, at], values[rows, :, at] = key.transpose(1, 2), value.transpose(1, 2)
            else:
                stop = at + key.shape[2]
                keys[:, :, at:stop], values[:, :, at:stop] = key, value


class CacheState(NamedTuple):
    """The positions that a cache holds. Each call makes another state, which may share the buffer with this one.

    Without `limits` the buffer grows, `longest` is always known, and `lengths` are on the host.
    With limits, compiled code reads `lengths` alone, since a number that changes makes a graph for each step.
    """

    buffer: KeyValueBuffer
    limits: Limits | None
    longest: int | None  # the positions of the longest sequence; None: compiled code has counted them in `lengths`
    lengths: Tensor | None = None  # (B,), of each sequence: with limits on the device of the keys; None: all are equal
    ends: Ends | None = None  # `lengths`, where eager code knows that they differ

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
        """The position at which the sequences go on, a number, or (B,) where they may differ."""
        if self.limits is None:
            equal = self.lengths is None
        else:
            equal = self.longest is not None and self.ends is None and not get_mode().compiled
        found = self.longest if equal else self.lengths
        assert found is not None
        return found

    def list_lengths(self) -> Ends:
        """The number of positions of each sequence."""
        if self.lengths is not None:
            return tuple(self.lengths.tolist())
        return (self.length,) * self.buffer.keys.shape[0]

    def starts(self) -> Tensor:
        """The position at which each sequence goes on, (B,), on the host."""
        if self.lengths is not None:
            return self.lengths.cpu()
        return torch.full((self.buffer.keys.shape[0],), self.length, dtype=torch.int64, device="cpu")

    def advance(
        self, size: int, counts: Tensor | None, eager: bool
    ) -> tuple[Tensor | None, Tensor | None, int | None, Ends | None]:
        """Count `size` new positions, or these of each sequence, (B,).

        Returns:
            Where the sequences go on, (B,), None where all stand side by side; then `lengths`, `longest` and `ends` of
            the next state.
        """
        if self.limits is None and self.lengths is None and counts is None:
            assert self.longest is not None
            return None, None, self.longest + size, None
        starts = self.starts() if self.limits is None or self.lengths is None else self.lengths
        with torch.inference_mode(False):  # compiled code takes no tensor of that mode
            stops = starts + (size if counts is None else counts)
        if self.limits is not None and (self.limits.window is not None or not eager):
            return starts, stops, None, None
        if counts is None and self.longest is not None:
            if eager and self.ends is not None:
                return starts, stops, self.longest + size, tuple(map(size.__add__, self.ends))
            return None if self.limits is not None else starts, stops, self.longest + size, None
        if self.limits is not None and not readable(stops):
            return starts, stops, None, None
        return starts, stops, *_find_longest(stops.tolist())  # a cache that grows needs it: compiled code reads it too

    def clone(self) -> CacheState:
        """The state in memory of its own, which can be written to in inference mode and outside it."""
        lengths = None if self.lengths is None else own(self.lengths)
        return self._replace(buffer=KeyValueBuffer(own(self.buffer.keys), own(self.buffer.values)), lengths=lengths)

    def crop(self, lengths: Tensor) -> CacheState:
        """The state with the first `lengths` positions of each sequence, (B,), on the host."""
        starts = self.starts()
        if lengths.numel() and torch.equal(lengths, starts):
            return self
        longest, ends = _find_longest(lengths.tolist())
        if self.limits is None:
            buffer, each = KeyValueBuffer(self.buffer.keys, self.buffer.values), None if ends is None else lengths
            return CacheState(buffer, None, longest, each, ends)
        if self.limits.window is not None and bool(((lengths < starts) & (starts > self.limits.capacity)).any()):
            raise ClearheadError(
                f"crop: sequences of {tuple(starts.tolist())} positions have left the {self.limits.capacity} slots of "
                "this cache, which has a window: the positions that the shorter ones would need are gone.\nCrop a "
                "KeyValueCache(capacity=...), or a copy that was made before: copy.copy(cache)."
            )
        with torch.inference_mode(False):
            return CacheState(self.buffer, self.limits, longest, lengths.to(self.buffer.keys.device), ends)

    def select(self, at: Tensor) -> CacheState:
        """The state with these entries of the batch; with limits in the same memory, where their number is the same."""
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


class CacheStep(NamedTuple):
    """One call: the keys and values that its queries may see, and the state after it."""

    key: Tensor
    value: Tensor
    state: CacheState
    lengths: Tensor | None  # (B,), how many of the keys each sequence has; None: all
    starts: Tensor | None = None  # (B,), the position of query 0
    at: Tensor | None = None  # (B, keys), the position of each key, −1 for none; None: they stand in order
    slots: Tensor | None = None  # (B, L), of the newest keys, where they are written after the call alone
    before: tuple[Tensor, Tensor, Tensor] | None = None  # keys, values, and their slots, which it took
    compiled: bool = False  # whether the call is compiled

    def limit_mask(self, mask: Any, bias: Any, score: Score, sizes: Sizes) -> tuple[Any, Any]:
        """The mask and the bias of a call with this score, without the slots that hold no key of a sequence. Where a
        step has neither `lengths` nor `starts`, all slots hold keys."""
        limits = self.state.limits
        if limits is None or limits.window is None:
            assert self.lengths is not None
            if self.compiled or self.state.longest is None:
                return with_lengths(mask, self.lengths, bias)
            # compiled code has counted the unequal lengths of a cache that grows, and eager code goes on
            ends = self.state.ends or ((self.state.longest,) if limits else tuple(self.lengths.tolist()))
            held = HeldKeys(self.lengths[: len(ends)], ends)
            if mask is None or isinstance(mask, Mask):
                return held if mask is None else mask & held, bias
            return with_lengths(mask, [*held.ends], bias)
        _check_by_position(mask, bias, score)
        if self.at is None:
            own: Mask = SlidingWindow(before=limits.window - 1, after=FAR)
            own = own | FirstKeys(limits.first) if limits.first else own
            return with_lengths(own if mask is None else mask & own, self.lengths, None)
        if self.lengths is not None and (mask is None or type(mask) is Causal):
            return Lengths(self.lengths), None  # one query, after all keys, and the window is all that is held
        return self._mask_by_position(mask, sizes, limits), None

    def _mask_by_position(self, mask: Mask | None, sizes: Sizes, limits: Limits) -> Tensor:
        """The mask as a tensor (B, H or 1, Lq, keys), by the positions of queries and keys."""
        assert self.at is not None and self.starts is not None and limits.window is not None
        at, starts = self.at[:, None, None], self.starts[:, None, None, None]
        rows = starts + torch.arange(sizes.queries, device=at.device)[:, None]
        keep = (at >= 0) & ((at < limits.first) | (at > rows - limits.window))
        far = sizes._replace(keys=FAR, align=self.starts)
        spans = all_keys(far) if mask is None else mask._resolve(far)
        return keep & spans.within(at)


def _check_by_position(mask: Any, bias: Any, score: Score) -> None:
    """Raise for what needs a row of all keys."""
    if score.changed_by is not None:
        raise UnsupportedError(
            f"the module's score is {score}, and the cache has a window: it does not hold all positions, and the "
            "function after the score is asked with positions.\nUse KeyValueCache(capacity=...), which holds them all."
        )
    if bias is not None:
        raise UnsupportedError(
            "a bias of the call or the module, or a float mask, is used beside a cache with a window, which does not "
            "hold all positions.\nUse KeyValueCache(capacity=...), which holds them all."
        )
    if mask is not None and not (isinstance(mask, Mask) and all(type(one) in ENDLESS for one in leaves(mask))):
        title = mask.title() if isinstance(mask, Mask) else brief(mask)
        raise UnsupportedError(
            f"the mask is {title}, and the cache has a window: it does not hold all positions, so a mask beside it is "
            "made of Causal(), SlidingWindow(), FirstKeys(), Lengths() and PrefixLM(), with &, | and ~.\nFor other "
            "masks use KeyValueCache(capacity=...), which holds all positions."
        )


def extend(
    state: CacheState | None, limits: Limits | None, key: Tensor, value: Tensor, new_lens: Any, mode: Mode
) -> CacheStep:
    """The step that adds keys and values (B, Hk, L, E) to a state; None is that of an empty cache.

    A buffer that grows is doubled where it is full. With limits, queries of the first call see its own keys alone.
    """
    size, first = key.shape[2], state is None
    if limits is not None:
        _check_no_graph(key, value, mode)
    if state is None:
        state = CacheState(KeyValueBuffer(key[:, :, :0], value[:, :, :0], mode=mode), None, 0)
        if limits is not None:
            with torch.inference_mode(False):
                none = torch.zeros(key.shape[0], dtype=torch.int64, device=key.device)
            state = CacheState(KeyValueBuffer.empty(key, value, limits.capacity + 1, mode), limits, 0, none)
    counts = None
    if new_lens is not None:  # with limits on the device of the keys, where compiled code asserts the values
        counts = kept = check_integers(new_lens, "new_lens", key.shape[0], None if limits is None else key.device)
        ensure(
            kept <= size,
            lambda: ClearheadError(f"new_lens is {(*kept.tolist(),)}, and there are {size} new keys of each sequence."),
            "new_lens: more than there are new keys",
        )
    starts, stops, longest, ends = state.advance(size, counts, not mode.compiled)
    lengths = None if limits is None and counts is not None and ends is None else stops
    if limits is None and isinstance(state.longest, torch.SymInt) and mode.exported:
        raise UnsupportedError(
            "a KeyValueCache() that grows goes on at a position that follows from the exported lengths, which "
            "torch.export can't tell from a number here. Pass KeyValueCache(capacity=most), of the most "
            "positions, or export with strict=True."
        )
    if limits is not None and limits.window is not None:
        assert starts is not None and stops is not None
        return _extend_window(CacheState(state.buffer, limits, None, stops), starts, key, value, counts, first)
    buffer = state.buffer
    if limits is not None:
        assert stops is not None and state.lengths is not None
        too_many = functools.partial(_make_capacity_error, limits, state.lengths, stops)
        if (longest or (size if first and counts is None else 0)) > limits.capacity:
            raise too_many()
        if longest is None:
            ensure(stops <= limits.capacity, too_many, "KeyValueCache: more positions than its capacity")
    elif (torch.is_grad_enabled() or not mode.eager) and _needs_graph(state, key, value, mode):
        pairs = (state.key, key), (state.value, value)
        keys, values = (_concatenate(*pair, longest, starts, stops) for pair in pairs)
        after = CacheState(KeyValueBuffer(keys, values, mode=mode), None, longest, lengths, ends)
        return CacheStep(keys, values, after, lengths, compiled=mode.compiled)
    else:
        assert longest is not None and state.longest is not None
        if not buffer.free or longest >= buffer.keys.shape[2] or buffer.compiled != mode.compiled:
            # the last slot is never held: a view of all would have other strides, and need a graph of its own
            buffer = KeyValueBuffer.empty(key, value, max(LEAST, longest + 1, 2 * state.longest), mode)
            buffer.write(0, state.key, state.value, counted=False)
    at: Any = state.longest
    if starts is not None:
        at = starts[:, None] if size == 1 else starts[:, None] + torch.arange(size, device=starts.device)
        if counts is not None or longest is None:
            assert stops is not None
            at = (limits or Limits(buffer.keys.shape[2] - 1)).find_slots(at, stops[:, None])
        at = moved(at, key.device)
    buffer.write(at, key, value, counted=limits is not None)
    if limits is None:
        buffer.free, buffer = False, KeyValueBuffer(buffer.keys, buffer.values, True, mode)
    after = CacheState(buffer, limits, longest, lengths, ends)
    if limits is not None and first:
        return CacheStep(key, value, after, counts, compiled=mode.compiled)
    return CacheStep(after.key, after.value, after, lengths, compiled=mode.compiled)


def _extend_window(
    after: CacheState, starts: Tensor, key: Tensor, value: Tensor, counts: Tensor | None, first: bool
) -> CacheStep:
    """The step to the state `after`, where new positions take the slots of old ones."""
    size, buffer, limits, stops = key.shape[2], after.buffer, after.limits, after.lengths
    assert limits is not None and stops is not None
    positions = starts[:, None] + torch.arange(size, device=key.device)
    slots = limits.find_slots(positions, stops[:, None])
    if first:
        buffer.write(slots, key, value)
        return CacheStep(key, value, after, counts, starts)
    if size == 1:  # the slot that is written to held a position that this query can't see
        # a call that raises gives back the slot that it took: see `KeyValueCache._restore_overwritten`; in compiled
        # code the graph that ends at the error keeps what the slot held, and a step of one graph leaves out this read
        rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        key_before, value_before = (t[rows, :, slots].transpose(1, 2) for t in (buffer.keys, buffer.values))
        buffer.write(slots, key, value)
        held, at = stops.clamp(max=limits.capacity), limits.find_positions(stops[:, None])
        return CacheStep(after.key, after.value, after, held, starts, at, before=(key_before, value_before, slots))
    # the new keys take slots of old ones, which the first of these queries see: they are written after the call
    at = torch.cat([limits.find_positions(starts[:, None]), torch.where(positions < stops[:, None], positions, -1)], 1)
    both = [torch.cat(pair, 2) for pair in ((after.key, key), (after.value, value))]
    return CacheStep(both[0], both[1], after, None, starts, at, slots)


def _needs_graph(state: CacheState, key: Tensor, value: Tensor, mode: Mode) -> bool:
    """Whether derivatives follow the keys, so that each step makes new tensors.

    Forward mode and `torch.func` follow them where gradients are off, too. `torch.export` leaves out writes through
    `.data`, and a trace would keep the buffer as a constant.
    """
    grad = torch.is_grad_enabled()
    if grad and any(t.requires_grad for t in (key, value, state.buffer.keys, state.buffer.values)):
        return True
    return not mode.eager and (mode.operations_only or mode.exported or (grad and not mode.compiled))


def _concatenate(old: Tensor, new: Tensor, end: Any, starts: Tensor | None, stops: Tensor | None) -> Tensor:
    """The old and the new positions in a tensor of `end` positions: the new ones from `starts` to `stops`, each (B,).

    Positions are gathered: `vmap` over forward mode has no rule for the writes of `index_put`'s derivative.
    """
    if starts is None or stops is None:
        return torch.cat([old, new], 2)
    empty = new.new_zeros(new.shape[0], new.shape[1], 1, new.shape[3])
    every, first = torch.arange(end, device="cpu"), starts[:, None]
    at = torch.where(every < first, every, old.shape[2] + every - first)
    at = moved(torch.where(every < stops[:, None], at, old.shape[2] + new.shape[2]), new.device)
    return torch.cat([old, new, empty], 2).gather(2, at[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3]))


def _find_longest(lengths: list[int]) -> tuple[int, Ends | None]:
    """The largest length, and the lengths; None where all are equal."""
    longest = max(lengths, default=0)
    return longest, tuple(lengths) if min(lengths, default=0) < longest else None


def _make_capacity_error(limits: Limits, starts: Tensor, stops: Tensor) -> ClearheadError:
    return ClearheadError(
        f"the cache has a capacity of {limits.capacity} positions; it holds {tuple(starts.tolist())} of its "
        f"sequences, which would become {tuple(stops.tolist())}.\nMake KeyValueCache(capacity=...) for prompt and "
        "new tokens together, or KeyValueCache(window=..., first=...), which lets old positions go."
    )


def _check_no_graph(key: Tensor, value: Tensor, mode: Mode) -> None:
    """Raise for keys that have a graph: they are written in place, into memory without one."""
    if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
        raise ClearheadError(
            "a cache of fixed capacity keeps no graph, and the new keys need a gradient. Decode under torch.no_grad() "
            "or torch.inference_mode(); to train through a cache pass KeyValueCache(), which grows."
        )
    if mode.operations_only:
        raise UnsupportedError(
            "a cache of fixed capacity is written in place, which torch.func and forward mode can't follow. Pass "
            "KeyValueCache(), which grows."
        )


def check_integers(given: Any, name: str, batch: int | None, device: torch.device | None = None) -> Tensor:
    """Integers (B,), 0 or more, as a copy on this device, or read on the host; for any B where `batch` is None."""
    if device is None and ((mode := get_mode()).compiled or mode.traced):
        raise UnsupportedError(
            f"{name} is read on the host, which compiled and traced code can't. Call the module outside of the "
            "compiled function."
        )
    numbers = check_lengths(given, name)
    batch = numbers.numel() if batch is None else batch
    if numbers.ndim != 1 or numbers.shape[0] != batch:
        raise ShapeError(f"{name} has shape {tuple(numbers.shape)}; expected ({batch},), one for each sequence.")
    return numbers.cpu() if device is None else placed(numbers, device, name)
