"""The keys and values of what has been decoded."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.base.arrays import check_float
from clearhead.base.errors import ClearheadError, ShapeError, UnsupportedError, columns
from clearhead.base.numbers import check_count
from clearhead.base.shapes import placed
from clearhead.base.tracing import compiling, ensure
from clearhead.masks._lengths import check_lengths

LEAST = 16  # positions that the first buffer has
Lengths = tuple[int, ...]


class _Buffer:
    """Room for keys and values. `last`: the view of its keys that was given out last.

    It is written through `.data`, which has a version counter of its own. Positions that a sequence has in a view given
    out are never written again, so the view's own counter tells only of writes by others.
    """

    def __init__(self, key: Tensor, value: Tensor, capacity: int) -> None:
        # a tensor of inference mode could not be written to outside it, nor tell of writes
        with torch.inference_mode(False):
            self.key, self.value = (t.new_zeros(*t.shape[:2], capacity, t.shape[3]) for t in (key, value))
        self.last: Tensor | None = None

    def write(self, at: Any, key: Tensor, value: Tensor) -> None:
        with torch.no_grad():
            self.key.data[at] = key
            self.value.data[at] = value

    def state(self, end: int, lengths: Lengths | None) -> _State:
        self.last = self.key[:, :, :end]
        return _State(self, self.last, self.value[:, :, :end], lengths)


class _State(NamedTuple):
    buffer: _Buffer | None  # None: the tensors are whole
    key: Tensor  # (B, Hk, L, Ek), a view of the buffer
    value: Tensor
    lengths: Lengths | None = None  # None: every sequence has all L positions

    def starts(self) -> Lengths:
        return self.lengths or (self.key.shape[2],) * self.key.shape[0]

    def cut(self, lengths: Lengths) -> _State:
        """The first positions of each sequence, so many."""
        if lengths and lengths == self.starts():
            return self
        end = max(lengths, default=0)
        return _State(self.buffer, self.key[:, :, :end], self.value[:, :, :end], _unequal(lengths))


class KeyValueCache:
    """The projected keys and values of one `MultiHeadAttention` while decoding.

    >>> import torch, clearhead as ch
    >>> from clearhead.nn import KeyValueCache, MultiHeadAttention
    >>> attend, cache = MultiHeadAttention(8, 2).eval(), KeyValueCache()
    >>> x = torch.rand(1, 5, 8)
    >>> with torch.no_grad():
    ...     steps = [attend(token, token, token, ch.Causal(), cache=cache) for token in x.split(1, dim=1)]
    ...     torch.allclose(torch.cat(steps, 1), attend(x, x, x, ch.Causal()), atol=1e-6)
    True
    >>> cache
    KeyValueCache(length=5, batch=1, heads=2)

    One cache for each module and each batch. `len(cache)`: the positions of its longest sequence, `cache.lengths` those
    of each: they may differ (`new_lens` of the module). `reorder`, `crop` and `reset` choose from its batch
    and positions. Where gradients are off it doubles its room when that is full, so that a step costs what it adds;
    where they are on, each step makes new tensors.
    What a sequence holds in a tensor given out is never written again. `copy.copy(cache)` is a branch that
    grows by itself and shares the past. Raises a `ShapeError` where batch, heads or widths change, a `ClearheadError`
    where dtype or device do.

    A batch whose sequences come and go:

    >>> attend, cache = MultiHeadAttention(8, 2).eval(), KeyValueCache()
    >>> with torch.no_grad():
    ...     prompts = torch.rand(2, 4, 8)                               # of 4 and of 2 words
    ...     _ = attend(prompts, prompts, prompts, ch.Causal(), cache=cache, new_lens=[4, 2])
    ...     token = torch.rand(2, 1, 8)                                 # one more for each
    ...     _ = attend(token, token, token, ch.Causal(), cache=cache)
    >>> cache.lengths
    (5, 3)
    >>> cache.crop([5, 0])                                              # the second is done: room for another
    """

    def __init__(self) -> None:
        self._state: _State | None = None

    def __len__(self) -> int:
        return 0 if self._state is None else self._state.key.shape[2]

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """How many positions each sequence holds; None where there are no keys yet."""
        return None if self._state is None else self._state.starts()

    def append(self, key: Tensor, value: Tensor, new_lens: Any = None) -> tuple[Tensor, Tensor]:
        """Add keys (B, Hk, L, Ek) and values (B, Hk, L, Ev); returns all there are. Do not write to them.

        `new_lens`: integers (B,), how many of the new positions of each sequence are kept, the first ones; they follow
        what that sequence holds. None keeps them all. A returned tensor is undefined beyond `lengths`.
        """
        for name, tensor in (("key", key), ("value", value)):
            if not isinstance(tensor, Tensor):
                raise ClearheadError(f"{name} is a {type(tensor).__name__}; expected a tensor (B, Hk, L, E).")
            check_float(tensor, name)
            if tensor.ndim != 4 or tensor.shape[2] != key.shape[2]:
                raise ShapeError(
                    f"{name} has shape {tuple(tensor.shape)}; expected (B, Hk, L, E), keys and values of one length.\n"
                    + columns({"key": tuple(key.shape), "value": tuple(getattr(value, "shape", ()))})
                )
        if self._state is None and torch.is_grad_enabled():  # else the first keys would be the caller's own memory
            key, value = key.clone(), value.clone()
        self._state = self._extended(key, value, new_lens)
        return self._state.key, self._state.value

    def reorder(self, indices: Tensor) -> None:
        """Keep the batch entries `indices`, integers (N,), in that order; one may come several times, or not at all.

        >>> import torch
        >>> from clearhead.nn import KeyValueCache
        >>> cache = KeyValueCache()
        >>> _ = cache.append(torch.rand(3, 2, 5, 4), torch.rand(3, 2, 5, 4))
        >>> cache.reorder(torch.tensor([2, 2, 0, 1]))               # beam search: the hypotheses that go on
        >>> cache
        KeyValueCache(length=5, batch=4, heads=2)

        Raises a `ClearheadError` for entries outside the batch, and in an empty cache. Cost: a copy.
        """
        if self._state is None:
            raise ClearheadError("the cache is empty: it has no batch to reorder before its first keys.")
        _, key, value, lengths = self._state
        indices = _check_indices(indices, key.shape[0])
        at = placed(indices, key.device, "indices")
        state = _State(None, key.index_select(0, at), value.index_select(0, at))
        self._state = state if lengths is None else state.cut(tuple(lengths[i] for i in indices.tolist()))

    def crop(self, length: Any) -> None:
        """Keep the first `length` positions, one number for all sequences, or integers (B,), one for each.

        >>> import torch
        >>> from clearhead.nn import KeyValueCache
        >>> cache = KeyValueCache()
        >>> _ = cache.append(torch.rand(1, 2, 5, 4), torch.rand(1, 2, 5, 4))
        >>> cache.crop(3)                                           # two drafted tokens were refused
        >>> len(cache)
        3

        Raises a `ClearheadError` for more than there are. Cost: none now; the next keys make a copy of what is kept.
        """
        one_each = isinstance(length, list | tuple | range) or (hasattr(length, "shape") and len(length.shape) > 0)
        held = self.lengths or ()
        if one_each:
            kept = _integers(length, "length", None if self._state is None else len(held))
            fits = all(new <= old for new, old in zip(kept, held or (0,) * len(kept), strict=True))
        else:
            most = check_count(length, 0, "length")
            kept, fits = tuple(min(most, old) for old in held), most <= len(self)
        if not fits:
            raise ClearheadError(
                f"length is {length}, and the cache holds {_said(held, len(self))} positions: crop can't add any."
            )
        if self._state is not None:
            self._state = self._state.cut(kept)

    def reset(self) -> None:
        """Forget everything, for another batch."""
        self._state = None

    def _extended(self, key: Tensor, value: Tensor, new_lens: Any = None) -> _State:
        """The state after `append`; the cache stays as it is until this is assigned to it."""
        if self._state is not None:
            _check(self._state, key, value)
        new = None
        if new_lens is not None or (self._state is not None and self._state.lengths is not None):
            new = _New(self.lengths or (0,) * key.shape[0], _counts(new_lens, key), key.shape[2])
        return self._joined(key, value, new) if torch.is_grad_enabled() else self._written(key, value, new)

    def _joined(self, key: Tensor, value: Tensor, new: _New | None) -> _State:
        if new is not None:
            old = (None, None) if self._state is None else (self._state.key, self._state.value)
            return _State(None, new.after(old[0], key), new.after(old[1], value), _unequal(new.ends))
        if self._state is None:
            return _State(None, key, value)
        return _State(None, torch.cat([self._state.key, key], 2), torch.cat([self._state.value, value], 2))

    def _written(self, key: Tensor, value: Tensor, new: _New | None) -> _State:
        length, every = len(self), slice(None)
        end = length + key.shape[2] if new is None else max(new.ends, default=0)
        state, buffer = self._state, None if self._state is None else self._state.buffer
        # another view was given out since: a branch of this cache goes on there, or a call that failed
        if state is None or buffer is None or buffer.last is not state.key or end > buffer.key.shape[2]:
            buffer = _Buffer(key, value, max(LEAST, 1 << max(end - 1, 0).bit_length()))
            if state is not None:
                buffer.write((every, every, slice(0, length)), state.key, state.value)
        if new is None:
            buffer.write((every, every, slice(length, end)), key, value)
            return buffer.state(end, None)
        rows, places, at = (index.to(key.device) for index in new.kept())
        buffer.write((rows, every, at), key[rows, :, places], value[rows, :, places])
        return buffer.state(end, _unequal(new.ends))

    def __deepcopy__(self, memo: object) -> KeyValueCache:
        return copy.copy(self)  # as independent as a deep one: nothing given out is written again

    def __repr__(self) -> str:
        if self._state is None:
            return "KeyValueCache(empty)"
        batch, heads = self._state.key.shape[:2]
        each = "" if self._state.lengths is None else f"{min(self._state.lengths)} to "
        return f"KeyValueCache(length={each}{len(self)}, batch={batch}, heads={heads})"


class _New(NamedTuple):
    """New positions of sequences that hold unequal numbers: where they begin, and how many of the `size` are kept."""

    starts: Lengths
    counts: Lengths
    size: int

    @property
    def ends(self) -> Lengths:
        return tuple(start + count for start, count in zip(self.starts, self.counts, strict=True))

    def kept(self) -> tuple[Tensor, Tensor, Tensor]:
        """For each position that is kept: its sequence, its place among the new ones and in the cache."""
        starts, counts = (torch.tensor(numbers, dtype=torch.int64, device="cpu") for numbers in self[:2])
        rows, places = (torch.arange(self.size, device="cpu") < counts[:, None]).nonzero(as_tuple=True)
        return rows, places, starts[rows] + places

    def after(self, old: Tensor | None, new: Tensor) -> Tensor:
        """The new positions (B, Hk, L, E) after the old ones, a tensor of their own."""
        end = max(self.ends, default=0)
        whole = new.new_zeros(*new.shape[:2], end, new.shape[3])
        if old is not None:
            whole = torch.cat([old, whole[:, :, old.shape[2] :]], 2)[:, :, :end]
        rows, places, at = (index.to(new.device) for index in self.kept())
        moved = whole.transpose(1, 2).index_put((rows, at), new[rows, :, places])
        return moved.transpose(1, 2)


def _unequal(lengths: Lengths) -> Lengths | None:
    """None where all are the same, and so the length of the tensors."""
    return lengths if len(set(lengths)) > 1 else None


def _counts(new_lens: Any, key: Tensor) -> Lengths:
    """How many of the new positions each sequence keeps."""
    batch, size = key.shape[0], key.shape[2]
    if new_lens is None:
        return (size,) * batch
    counts = _integers(new_lens, "new_lens", batch)
    if any(count > size for count in counts):
        raise ClearheadError(f"new_lens is {counts}, and there are {size} new keys of each sequence.")
    return counts


def _said(lengths: Lengths, longest: int) -> str:
    return str(longest) if len(set(lengths)) < 2 else str(lengths)


def _integers(given: Any, name: str, batch: int | None) -> Lengths:
    """Integers (B,), 0 or more; for any B where `batch` is None."""
    if compiling():
        raise UnsupportedError(
            f"{name} is read on the host, which compiled code can't. Call the module outside of the compiled function."
        )
    numbers = check_lengths(given, name)
    batch = numbers.numel() if batch is None else batch
    if tuple(numbers.shape) != (batch,):
        raise ShapeError(f"{name} has shape {tuple(numbers.shape)}; expected ({batch},), one for each sequence.")
    return tuple(numbers.tolist())


def _check_indices(indices: object, batch: int) -> Tensor:
    """Integers (N,) from 0 up to the batch."""
    if not isinstance(indices, Tensor):
        raise ClearheadError(f"indices is a {type(indices).__name__}; expected integers (N,): torch.tensor([0, 0, 2]).")
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool or indices.ndim != 1:
        raise ClearheadError(
            f"indices has dtype {indices.dtype}, shape {tuple(indices.shape)}; expected integers (N,): the entries of "
            "the batch that are kept."
        )
    ensure(
        (indices >= 0) & (indices < batch),
        lambda: ClearheadError(
            f"indices holds {int(indices.min())} to {int(indices.max())}, and the cache has a batch of {batch}."
        ),
        "indices: an entry is beyond the cache's batch",
    )
    return indices.long()


def _check(state: _State, key: Tensor, value: Tensor) -> None:
    for name, new, old in (("key", key, state.key), ("value", value, state.value)):
        differ = [-i for i in (4, 3, 1) if new.shape[-i] != old.shape[-i]]
        if differ:
            what = {-4: "batch", -3: "key heads", -1: "width"}[differ[0]]
            raise ShapeError(
                f"the new {name}s differ in {what} from those in the cache, projected (B, Hk, L, E).\n"
                + columns({"cache": tuple(old.shape), f"new {name}": tuple(new.shape)}, differ[0])
                + "\nEach module and each batch needs its own KeyValueCache()."
            )
        if new.dtype != old.dtype or new.device != old.device:
            raise ClearheadError(
                f"the new {name}s, shape {tuple(new.shape)}, are {new.dtype} on {new.device}, and the cache holds "
                f"{old.dtype} on {old.device}. Start with an empty KeyValueCache() after the module was converted."
            )
