"""Keys and values in a fixed number of places, written in place: in compiled code each step is the same graph."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError, ShapeError, UnsupportedError, columns
from clearhead.base.numbers import check_count
from clearhead.base.positions import FAR
from clearhead.base.shapes import Sizes, placed
from clearhead.base.text import brief
from clearhead.base.tracing import compiling, ensure, looked_into, transformed
from clearhead.masks._read import check_lengths
from clearhead.masks.base import Mask, all_keys, leaves
from clearhead.masks.causal import Causal
from clearhead.masks.first_keys import FirstKeys
from clearhead.masks.lengths import Lengths
from clearhead.masks.prefix_lm import PrefixLM
from clearhead.masks.sliding_window import SlidingWindow
from clearhead.problem.lengths import with_lengths
from clearhead.scores.base import Score

ENDLESS = (Causal, SlidingWindow, FirstKeys, Lengths, PrefixLM)  # masks whose intervals do not need the number of keys


class Limits(NamedTuple):
    """What a cache keeps of each sequence: positions up to `capacity`, each at the place of its own number; or, with a
    `window`, the `first` positions, and the last ones, which take turns in the `window` places after these."""

    capacity: int
    window: int | None = None
    first: int = 0

    def places(self, positions: Tensor, ends: Tensor) -> Tensor:
        """The place of each position, (B, L), of sequences that end before `ends`, (B, 1). The place `capacity` is for
        positions that are not kept."""
        kept, at = positions < ends, positions
        if self.window is not None:
            at = torch.where(positions < self.first, positions, self.first + (positions - self.first) % self.window)
            kept = kept & ((positions < self.first) | (positions >= ends - self.window))
        return torch.where(kept, at, self.capacity).clamp(max=self.capacity)

    def positions(self, ends: Tensor) -> Tensor:
        """The position that each place holds, (B, capacity), of sequences that end before `ends`, (B, 1); −1 for none.

        The inverse of `places`.
        """
        at = torch.arange(self.capacity, device=ends.device)
        if self.window is not None:
            last = ends - 1 - (ends - 1 - at) % self.window  # the last position that has this place's turn
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
                f"and the first {first} need {window + first} places: leave capacity out."
            )
        return Limits(window + first, window, first)
    if first:
        raise ClearheadError(
            f"KeyValueCache: first is {first} without a window: the first positions are kept beside the last ones. "
            f"Pass KeyValueCache(window=256, first={first})."
        )
    return None if capacity is None else Limits(check_count(capacity, 1, "KeyValueCache: capacity"))


class Fixed(NamedTuple):
    """The state of a cache of fixed capacity. Its tensors are written in place, but for `lengths`.

    `known`: the number of positions where it is known to be that of every sequence, as eager code without `new_lens`
    counts it: then masks are plain values, which the layers of a model share. Compiled code, which would make a graph
    for each number, neither reads nor gives it.
    """

    limits: Limits
    keys: Tensor  # (B, Hk, capacity + 1, Ek); the last place takes what is not kept
    values: Tensor
    lengths: Tensor  # (B,), the number of positions of each sequence, on the device of the keys
    known: int | None = None

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    @property
    def key(self) -> Tensor:
        return self.keys[:, :, :-1]

    @property
    def value(self) -> Tensor:
        return self.values[:, :, :-1]

    @property
    def length(self) -> int:
        return int(self.lengths.max()) if self.lengths.numel() else 0

    @property
    def past(self) -> int | Tensor:
        """The position at which the sequences go on, a number, or (B,)."""
        return self.lengths if compiling() or self.known is None else self.known

    def starts(self) -> Tensor:
        """The same on the host."""
        return self.lengths.cpu()

    def copied(self) -> Fixed:
        """The state in memory of its own, which can be written to in inference mode and outside it."""
        with torch.inference_mode(False):
            keys, values, lengths = self.keys.clone(), self.values.clone(), self.lengths.clone()
        return self._replace(keys=keys, values=values, lengths=lengths)

    def ordinary(self) -> Fixed:
        """The state in tensors that were not made in inference mode."""
        return self.copied()

    def cut(self, lengths: Tensor) -> Fixed:
        """The state with the first `lengths` positions of each sequence."""
        ends = self.starts()
        if self.limits.window is not None and bool(((lengths < ends) & (ends > self.limits.capacity)).any()):
            raise ClearheadError(
                f"crop: sequences of {tuple(ends.tolist())} positions have left the {self.limits.capacity} places of "
                "this cache, which has a window: the positions that the shorter ones would need are gone.\nCrop a "
                "KeyValueCache(capacity=...), or a copy that was made before: copy.copy(cache)."
            )
        with torch.inference_mode(False):
            same = set(lengths.tolist())
            known = same.pop() if len(same) == 1 else None
            return self._replace(lengths=lengths.to(self.lengths.device), known=known)

    def chosen(self, at: Tensor) -> Fixed:
        """The state with these entries of the batch; in the same memory, where their number is the same."""
        keys, values = (t.index_select(0, at) for t in (self.keys, self.values))
        with torch.inference_mode(False):
            lengths = self.lengths.index_select(0, at)
            if keys.shape != self.keys.shape:
                return self._replace(keys=keys.clone(), values=values.clone(), lengths=lengths)
        self.keys.copy_(keys)
        self.values.copy_(values)
        return self._replace(lengths=lengths)

    def read(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values (B, Hk, L, E) at these places, (B, L)."""
        rows = torch.arange(places.shape[0], device=places.device)[:, None]
        return self.keys[rows, :, places].transpose(1, 2), self.values[rows, :, places].transpose(1, 2)

    def write(self, key: Tensor, value: Tensor, places: Tensor) -> None:
        """Write keys and values (B, Hk, L, E) to their places, (B, L)."""
        rows = torch.arange(places.shape[0], device=places.device)[:, None]
        self.keys[rows, :, places] = key.transpose(1, 2)
        self.values[rows, :, places] = value.transpose(1, 2)


class Step(NamedTuple):
    """One call: the keys and values that its queries may see, and the state after it."""

    key: Tensor
    value: Tensor
    state: Fixed
    lengths: Tensor | None  # (B,), how many of the keys each sequence has; None: all
    starts: Tensor  # (B,), the position of query 0
    at: Tensor | None = None  # (B, keys), the position of each key, −1 for none; None: they stand in order
    places: Tensor | None = None  # (B, L), of the newest keys, where they are written after the call alone
    before: tuple[Tensor, Tensor, Tensor] | None = None  # keys, values, and their places, which it took

    def kept(self) -> Fixed:
        """The state, once the call has succeeded."""
        if self.places is not None:
            old = self.state.limits.capacity
            self.state.write(self.key[:, :, old:], self.value[:, :, old:], self.places)
        return self.state

    def seen(self, mask: Any, bias: Any, score: Score, sizes: Sizes) -> tuple[Any, Any]:
        """The mask and the bias of a call with this score, over the places of the keys, without those that hold
        none."""
        window, first = self.state.limits.window, self.state.limits.first
        if window is None:
            if compiling() or self.lengths is None or self.state.known is None:
                return with_lengths(mask, self.lengths, bias)
            return (_up_to(self.state.known), bias) if mask is None else with_lengths(mask, [self.state.known], bias)
        _check_by_position(mask, bias, score)
        if self.at is None:
            own: Mask = SlidingWindow(before=window - 1, after=FAR)
            own = own | FirstKeys(first) if first else own
            return with_lengths(own if mask is None else mask & own, self.lengths, None)
        if self.lengths is not None and (mask is None or type(mask) is Causal):
            return Lengths(self.lengths), None  # one query, after all keys, and the window is all that is held
        return self._pairs(mask, sizes), None

    def _pairs(self, mask: Mask | None, sizes: Sizes) -> Tensor:
        """The mask as a tensor (B, H or 1, Lq, keys), by the positions of queries and keys."""
        assert self.at is not None and self.state.limits.window is not None
        at, starts = self.at[:, None, None], self.starts[:, None, None, None]
        rows = starts + torch.arange(sizes.queries, device=at.device)[:, None]
        keep = (at >= 0) & ((at < self.state.limits.first) | (at > rows - self.state.limits.window))
        far = sizes._replace(keys=FAR, align=self.starts)
        spans = all_keys(far) if mask is None else mask._resolve(far)
        return keep & spans.within(at)


@functools.lru_cache(maxsize=16)
def _up_to(length: int) -> Lengths:
    """The first keys of every sequence: one mask for all layers of a model."""
    return Lengths([length])


def _check_by_position(mask: Any, bias: Any, score: Score) -> None:
    """Refuse what needs a row of all keys."""
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
    if mask is not None and not _endless(mask):
        title = mask.title() if isinstance(mask, Mask) else brief(mask)
        raise UnsupportedError(
            f"the mask is {title}, and the cache has a window: it does not hold all positions, so a mask beside it is "
            "made of Causal(), SlidingWindow(), FirstKeys(), Lengths() and PrefixLM(), with &, | and ~.\nFor other "
            "masks use KeyValueCache(capacity=...), which holds all positions."
        )


def _endless(mask: Any) -> bool:
    return isinstance(mask, Mask) and all(type(one) in ENDLESS for one in leaves(mask))


def begun(limits: Limits, key: Tensor, value: Tensor, new_lens: Any) -> Step:
    """The first call: its queries see its own keys alone."""
    _check_plain(key, value)
    # tensors of inference mode could not be written to outside it, and compiled code takes none
    with torch.inference_mode(False):
        both = [t.new_zeros(t.shape[0], t.shape[1], limits.capacity + 1, t.shape[3]) for t in (key, value)]
        starts = torch.zeros(key.shape[0], dtype=torch.int64, device=key.device)
    return _stepped(Fixed(limits, both[0], both[1], starts), key, value, new_lens, first=True)


def extended(state: Fixed, key: Tensor, value: Tensor, new_lens: Any) -> Step:
    """A later call: its queries see what the cache holds, and its own keys."""
    _check_plain(key, value)
    return _stepped(state, key, value, new_lens, first=False)


def _stepped(state: Fixed, key: Tensor, value: Tensor, new_lens: Any, first: bool) -> Step:
    size, limits = key.shape[2], state.limits
    counts = None if new_lens is None else _counts(new_lens, key)
    starts = state.lengths
    with torch.inference_mode(False):
        ends = starts + (size if counts is None else counts)
    if not compiling() and counts is None and limits.window is None and (first or state.known is not None):
        return _beside(state, ends, key, value)
    if limits.window is None:
        _check_room(limits, starts, ends, size if first and counts is None else None)
    after = Fixed(limits, state.keys, state.values, ends)
    positions = starts[:, None] + torch.arange(size, device=key.device)
    places = limits.places(positions, ends[:, None])
    # a call that is refused gives back the place that it took: see `KeyValueCache._settle`; in compiled code the graph
    # that ends at the refusal keeps what it held, and a step of one graph leaves out this read
    pushes = limits.window is not None and size == 1 and not first
    before = (*state.read(places), places) if pushes else None
    if first or limits.window is None or size == 1:
        after.write(key, value, places)
    if first:
        return Step(key, value, after, counts, starts)
    if limits.window is None:
        return Step(after.key, after.value, after, ends, starts)
    if size == 1:  # the place that is written to held a position that this query can't see
        held, at = ends.clamp(max=limits.capacity), limits.positions(ends[:, None])
        return Step(after.key, after.value, after, held, starts, at, before=before)
    # the new keys take places of old ones, which the first of these queries see: they are written after the call
    at = torch.cat([limits.positions(starts[:, None]), torch.where(positions < ends[:, None], positions, -1)], 1)
    both = [torch.cat(pair, 2) for pair in ((state.key, key), (state.value, value))]
    return Step(both[0], both[1], after, None, starts, at, places)


def _beside(state: Fixed, ends: Tensor, key: Tensor, value: Tensor) -> Step:
    """The step of sequences of one length, whose new keys stand side by side. `ends`: (B,), where they end then."""
    begun = state.known is not None
    start = state.known or 0
    stop = start + key.shape[2]
    if stop > state.limits.capacity:
        raise _no_room(state.limits, state.lengths, ends)
    state.keys[:, :, start:stop], state.values[:, :, start:stop] = key, value
    after = state._replace(lengths=ends, known=stop)
    return Step(after.key, after.value, after, ends, state.lengths) if begun else Step(key, value, after, None, ends)


def _check_room(limits: Limits, starts: Tensor, ends: Tensor, size: int | None) -> None:
    """Refuse more positions than there are places. `size`: the number of positions of all, where it is known."""
    if size is None:
        no_room = functools.partial(_no_room, limits, starts, ends)
        ensure(ends <= limits.capacity, no_room, "KeyValueCache: more positions than its capacity")
    elif size > limits.capacity:
        raise _no_room(limits, starts, ends)


def _no_room(limits: Limits, starts: Tensor, ends: Tensor) -> ClearheadError:
    return ClearheadError(
        f"the cache has a capacity of {limits.capacity} positions; it holds {tuple(starts.tolist())} of its "
        f"sequences, which would become {tuple(ends.tolist())}.\nMake KeyValueCache(capacity=...) for prompt and "
        "new tokens together, or KeyValueCache(window=..., first=...), which lets old positions go."
    )


def _check_plain(key: Tensor, value: Tensor) -> None:
    """Refuse keys that have a graph: they are written in place, into memory without one."""
    if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
        raise ClearheadError(
            "a cache of fixed capacity keeps no graph, and the new keys need a gradient. Decode under torch.no_grad() "
            "or torch.inference_mode(); to train through a cache pass KeyValueCache(), which grows."
        )
    if transformed() or looked_into():
        raise UnsupportedError(
            "a cache of fixed capacity is written in place, which torch.func and forward mode can't follow. Pass "
            "KeyValueCache(), which grows."
        )


def _counts(new_lens: Any, key: Tensor) -> Tensor:
    """How many new positions each sequence keeps, (B,), on the device of the keys. Values are asserted in compiled
    code."""
    counts = placed(check_lengths(new_lens, "new_lens"), key.device, "new_lens")
    batch, size = key.shape[0], key.shape[2]
    if counts.ndim != 1 or counts.shape[0] != batch:
        raise ShapeError(f"new_lens has shape {tuple(counts.shape)}; expected ({batch},), one for each sequence.")
    ensure(
        counts <= size,
        lambda: ClearheadError(
            f"new_lens is {tuple(counts.tolist())}, and there are {size} new keys of each sequence."
        ),
        "new_lens: more than there are new keys",
    )
    if compiling():
        return counts
    with torch.inference_mode(False):
        return counts.clone()


def check_beside(state: Any, key: Tensor, value: Tensor) -> None:
    """Check new keys and values (B, Hk, L, E) beside those that a cache of either kind holds."""
    keys, values = state.memory  # of more positions than are held, and no view has to be made
    for name, new, old in (("key", key, keys), ("value", value, values)):
        batch, heads, _, width = new.shape
        if batch != old.shape[0] or heads != old.shape[1] or width != old.shape[3]:
            held = tuple(getattr(state, name).shape)
            at = -4 if batch != held[0] else -3 if heads != held[1] else -1
            what = {-4: "batch", -3: "key heads", -1: "width"}[at]
            raise ShapeError(
                f"the new {name}s differ in {what} from those in the cache, projected (B, Hk, L, E).\n"
                + columns({"cache": held, f"new {name}": tuple(new.shape)}, at)
                + "\nEach module and each batch needs its own KeyValueCache()."
            )
        if new.dtype != old.dtype or new.device != old.device:
            raise ClearheadError(
                f"the new {name}s, shape {tuple(new.shape)}, are {new.dtype} on {new.device}, and the cache holds "
                f"{old.dtype} on {old.device}. Start with an empty KeyValueCache() after the module was converted."
            )
