"""One call beside a `KeyValueCache`: the keys that its queries may attend to, and the state after it."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError, ShapeError, UnsupportedError
from clearhead.base.output.text import brief
from clearhead.base.positions import FAR
from clearhead.base.shapes import Sizes, moved, placed
from clearhead.base.torch_state.mode import Mode, get_mode
from clearhead.base.torch_state.tensor_kind import require_all
from clearhead.masks._read import check_lengths
from clearhead.masks.base import Mask, all_keys
from clearhead.masks.causal import Causal
from clearhead.masks.combined import leaves
from clearhead.masks.first_keys import FirstKeys
from clearhead.masks.lengths import Lengths
from clearhead.masks.prefix_lm import PrefixLM
from clearhead.masks.sliding_window import SlidingWindow
from clearhead.nn._cache_state import CacheState, KeyValueBuffer, Limits
from clearhead.problem.held_keys import HeldKeys
from clearhead.problem.lengths import with_lengths
from clearhead.scores.base import Score

LEAST = 16  # the positions of the first buffer
ENDLESS = (Causal, SlidingWindow, FirstKeys, Lengths, PrefixLM)  # masks whose intervals do not need the number of keys


class CacheStep(NamedTuple):
    """The keys and values of a call, and the state after it.

    Attributes:
        key, value: What the queries of the call may attend to.
        state: The state that the cache gets if the call succeeds.
        lengths: (B,), how many of the keys each sequence has; None: all.
        starts: (B,), the position of query 0, beside a window.
        at: (B, keys), the position of each key, −1 for none; None: the keys are in order.
        slots: (B, L), the slots of the newest keys, where they are written once the call has succeeded.
        is_compiled: Whether the call is compiled; not set beside a window.
    """

    key: Tensor
    value: Tensor
    state: CacheState
    lengths: Tensor | None
    starts: Tensor | None = None
    at: Tensor | None = None
    slots: Tensor | None = None
    is_compiled: bool = False

    def limit_mask(self, mask: Any, bias: Any, score: Score, sizes: Sizes) -> tuple[Any, Any]:
        """Return the mask and the bias of the call, without the slots that hold no key of a sequence.

        A step with neither `lengths` nor `starts` needs no such mask.
        """
        limits = self.state.limits
        if limits is None or limits.window is None:
            assert self.lengths is not None
            if self.is_compiled or self.state.longest is None:
                return with_lengths(mask, self.lengths, bias)
            ends, lengths = self.state.ends, self.lengths
            if ends is None and limits is not None:
                ends, lengths = (self.state.longest,), lengths[:1]
            elif ends is None:  # compiled code has counted the unequal lengths, and eager code goes on
                ends = tuple(lengths.tolist())
            held = HeldKeys(lengths, ends)
            if mask is None or isinstance(mask, Mask):
                return held if mask is None else mask & held, bias
            return with_lengths(mask, [*held.ends], bias)
        _check_window(mask, bias, score)
        if self.at is None:
            own: Mask = SlidingWindow(before=limits.window - 1, after=FAR)
            own = own | FirstKeys(limits.first) if limits.first else own
            return with_lengths(own if mask is None else mask & own, self.lengths, None)
        if self.lengths is not None and (mask is None or type(mask) is Causal):
            return Lengths(self.lengths), None  # one query, after all keys, and the window is all that is held
        return self._mask_by_position(mask, sizes, limits), None

    def _mask_by_position(self, mask: Mask | None, sizes: Sizes, limits: Limits) -> Tensor:
        """Return the mask as a tensor (B, H or 1, Lq, keys), from the positions of queries and keys."""
        assert self.at is not None and self.starts is not None and limits.window is not None
        at, starts = self.at[:, None, None], self.starts[:, None, None, None]
        rows = starts + torch.arange(sizes.queries, device=at.device)[:, None]
        keep = (at >= 0) & ((at < limits.first) | (at > rows - limits.window))
        far = sizes._replace(keys=FAR, align=self.starts)
        spans = all_keys(far) if mask is None else mask._resolve(far)
        return keep & spans.within(at)


def _check_window(mask: Any, bias: Any, score: Score) -> None:
    """Raise for a mask, a bias or a score that needs a row of all keys."""
    parts = leaves(mask) if isinstance(mask, Mask) else [mask]
    needs_all = bias is not None or score.changed_by is not None
    if needs_all or not (mask is None or all(type(part) in ENDLESS for part in parts)):
        title = mask.title() if isinstance(mask, Mask) else brief(mask)
        raise UnsupportedError(
            "beside a cache with a window a mask is made of Causal(), SlidingWindow(), FirstKeys(), Lengths() and "
            f"PrefixLM(), with &, | and ~; the mask is {title}. There is no bias, and no Score.then.\n"
            "Use KeyValueCache(capacity=...), which holds all positions."
        )


def extend(state: CacheState | None, limits: Limits | None, key: Tensor, value: Tensor, new_lens: Any) -> CacheStep:
    """Add keys and values (B, Hk, L, E) to a state, or to an empty cache.

    A full buffer that grows is doubled. With limits the queries of the first call attend to its own keys alone.

    Args:
        state: The state of the cache; None where it is empty.
        limits: Those of the cache.
        key, value: The new keys and values.
        new_lens: The argument of the module: how many of the new keys each sequence keeps.
    """
    size, first, mode = key.shape[2], state is None, get_mode()
    if limits is not None and (torch.is_grad_enabled() or not mode.eager):
        _check_no_graph(key, value, mode)
    if state is not None:
        if state.buffer.overwritten is not None:
            state.buffer.restore_overwritten()
    else:
        state = CacheState(KeyValueBuffer(key[:, :, :0], value[:, :, :0], mode=mode), None, 0)
        if limits is not None:
            with torch.inference_mode(False):
                none = torch.zeros(key.shape[0], dtype=torch.int64, device=key.device)
            state = CacheState(KeyValueBuffer.make_empty(key, value, limits.capacity + 1, mode), limits, 0, none)
    counts = None
    if new_lens is not None:  # with limits on the device of the keys, where compiled code asserts the values
        counts = kept = validate_counts(new_lens, "new_lens", key.shape[0], None if limits is None else key.device)
        require_all(
            kept <= size,
            lambda: ClearheadError(f"new_lens is {(*kept.tolist(),)}, and there are {size} new keys of each sequence."),
            "new_lens: more than there are new keys",
        )
    starts, stops, longest, ends = state.advance(size, counts, not mode.compiled)
    lengths = None if limits is None and counts is not None and ends is None else stops
    if limits is None and isinstance(state.longest, torch.SymInt) and mode.exported:
        raise UnsupportedError(
            "torch.export can't read the position at which a KeyValueCache() that grows goes on. Pass "
            "KeyValueCache(capacity=most), of the most positions, or export with strict=True."
        )
    if limits is not None and limits.window is not None:
        assert starts is not None
        return _extend_window(CacheState(state.buffer, limits, None, stops), starts, key, value, counts, first)
    buffer = state.buffer
    if limits is not None:
        assert stops is not None and state.lengths is not None
        too_many = functools.partial(_make_capacity_error, limits, state.lengths, stops)
        if (longest or (size if first and counts is None else 0)) > limits.capacity:
            raise too_many()
        if longest is None:
            require_all(stops <= limits.capacity, too_many, "KeyValueCache: more positions than its capacity")
    elif (torch.is_grad_enabled() or not mode.eager) and _needs_graph(state, key, value, mode):
        pairs = (state.key, key), (state.value, value)
        keys, values = (_concatenate(*pair, longest, starts, stops) for pair in pairs)
        after = CacheState(KeyValueBuffer(keys, values, mode=mode), None, longest, lengths, ends)
        return CacheStep(keys, values, after, lengths, is_compiled=mode.compiled)
    else:
        assert longest is not None and state.longest is not None
        if not buffer.is_free or longest >= buffer.keys.shape[2] or buffer.is_compiled != mode.compiled:
            # the last slot holds no position: a view of all slots would have other strides, and a graph of its own
            buffer = KeyValueBuffer.make_empty(key, value, max(LEAST, longest + 1, 2 * state.longest), mode)
            buffer.write(0, state.key, state.value, counted=False)
    at: Any = state.longest
    if starts is not None:
        at = starts[:, None] if size == 1 else starts[:, None] + torch.arange(size, device=starts.device)
        if counts is not None or longest is None:
            assert stops is not None
            at = (limits or Limits(buffer.keys.shape[2] - 1)).find_slots(at, stops[:, None])
        if at.device != key.device:
            at = moved(at, key.device)
    buffer.write(at, key, value, counted=limits is not None)
    if limits is None:
        buffer.is_free, buffer = False, KeyValueBuffer(buffer.keys, buffer.values, True, mode)
    after = CacheState(buffer, limits, longest, lengths, ends)
    if limits is not None and first:
        return CacheStep(key, value, after, counts, is_compiled=mode.compiled)
    held = longest if limits is None else -1
    keys, values = buffer.keys[:, :, :held], buffer.values[:, :, :held]
    return CacheStep(keys, values, after, lengths, is_compiled=mode.compiled)


def _extend_window(
    after: CacheState, starts: Tensor, key: Tensor, value: Tensor, counts: Tensor | None, first: bool
) -> CacheStep:
    """Make the step to the state `after`, where new positions take the slots of old ones."""
    size, buffer, limits, stops = key.shape[2], after.buffer, after.limits, after.lengths
    assert limits is not None and stops is not None
    positions = starts[:, None] + torch.arange(size, device=key.device)
    slots = limits.find_slots(positions, stops[:, None])
    if first:
        buffer.write(slots, key, value)
        return CacheStep(key, value, after, counts, starts)
    if size == 1:  # the slot that is written to held a position that this query does not attend to
        # if the call raises, the slot gets back what it held; compiled code that runs to its end drops this read
        rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        key_before, value_before = (t[rows, :, slots].transpose(1, 2) for t in (buffer.keys, buffer.values))
        buffer.write(slots, key, value)
        buffer.overwritten = key_before, value_before, slots
        held, at = stops.clamp(max=limits.capacity), limits.find_positions(stops[:, None])
        return CacheStep(after.key, after.value, after, held, starts, at)
    # the first of these queries attend to old keys, whose slots the new keys take: they are written after the call
    at = torch.cat([limits.find_positions(starts[:, None]), torch.where(positions < stops[:, None], positions, -1)], 1)
    both = [torch.cat(pair, 2) for pair in ((after.key, key), (after.value, value))]
    return CacheStep(both[0], both[1], after, None, starts, at, slots)


def _needs_graph(state: CacheState, key: Tensor, value: Tensor, mode: Mode) -> bool:
    """Whether the keys are part of a graph, so that each step makes new tensors.

    Forward mode and `torch.func` need it where gradients are off, too. `torch.export` leaves out writes through
    `.data`, and a trace would store the buffer as a constant.
    """
    grad = torch.is_grad_enabled()
    if grad and any(t.requires_grad for t in (key, value, state.buffer.keys, state.buffer.values)):
        return True
    return not mode.eager and (mode.operations_only or mode.exported or (grad and not mode.compiled))


def _concatenate(old: Tensor, new: Tensor, end: Any, starts: Tensor | None, stops: Tensor | None) -> Tensor:
    """Join old and new positions in a tensor of `end` positions: the new ones from `starts` to `stops`, each (B,).

    It gathers the positions, because `vmap` over forward mode has no rule for the writes of `index_put`'s derivative.
    """
    if starts is None or stops is None:
        return torch.cat([old, new], 2)
    empty = new.new_zeros(new.shape[0], new.shape[1], 1, new.shape[3])
    every, first = torch.arange(end, device="cpu"), starts[:, None]
    at = torch.where(every < first, every, old.shape[2] + every - first)
    at = moved(torch.where(every < stops[:, None], at, old.shape[2] + new.shape[2]), new.device)
    return torch.cat([old, new, empty], 2).gather(2, at[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3]))


def _make_capacity_error(limits: Limits, starts: Tensor, stops: Tensor) -> ClearheadError:
    return ClearheadError(
        f"the cache has a capacity of {limits.capacity} positions; it holds {tuple(starts.tolist())} of its "
        f"sequences, which would become {tuple(stops.tolist())}.\nMake KeyValueCache(capacity=...) for prompt and "
        "new tokens together, or KeyValueCache(window=..., first=...), which lets old positions go."
    )


def _check_no_graph(key: Tensor, value: Tensor, mode: Mode) -> None:
    """Raise for keys with a graph, which memory that is written in place can't keep."""
    if mode.operations_only or (torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)):
        raise UnsupportedError(
            "a cache of fixed capacity is written in place: it keeps no graph for gradients, torch.func and forward "
            "mode. Decode under torch.no_grad() or torch.inference_mode(), or pass KeyValueCache(), which grows."
        )


def validate_counts(given: Any, name: str, batch: int | None, device: torch.device | None = None) -> Tensor:
    """Return integers (B,), 0 or more, as a copy on the device, None for the host; `batch` None allows any B."""
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
