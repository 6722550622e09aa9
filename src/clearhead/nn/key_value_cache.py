"""The keys and values of what has been decoded."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.base.arrays import check_float
from clearhead.base.errors import ClearheadError, ShapeError, columns
from clearhead.base.numbers import check_count
from clearhead.base.shapes import placed
from clearhead.base.tracing import ensure

LEAST = 16  # positions that the first buffer has


class _Buffer:
    """Room for keys and values, of which the first `written` positions are taken.

    They are written through `.data`, which has a version counter of its own. The views given out show what is never
    written again, so their own counter tells only of writes by others.
    """

    def __init__(self, key: Tensor, value: Tensor, capacity: int) -> None:
        # a tensor of inference mode could not be written to outside it, nor tell of writes
        with torch.inference_mode(False):
            self.key, self.value = (t.new_empty(*t.shape[:2], capacity, t.shape[3]) for t in (key, value))
        self.written = 0

    def append(self, key: Tensor, value: Tensor) -> None:
        end = self.written + key.shape[2]
        with torch.no_grad():
            self.key.data[:, :, self.written : end] = key
            self.value.data[:, :, self.written : end] = value
        self.written = end


class _State(NamedTuple):
    buffer: _Buffer | None  # None: the tensors are whole
    key: Tensor  # (B, Hk, L, Ek), a view of the buffer
    value: Tensor


class KeyValueCache:
    """What one `MultiHeadAttention` has seen while decoding: its keys and values, projected.

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

    One cache for each module and each batch. `len(cache)`: the positions it holds; `reorder`, `crop` and `reset` choose
    of its batch and of its positions. Where gradients are off it doubles its room when that is full, so that a step
    costs what it adds; where they are on, each step makes new tensors.
    What it has given out is never written again. `copy.copy(cache)` is a branch that goes on by itself and shares the
    past. Raises a `ShapeError` where batch, heads or widths change, a `ClearheadError` where dtype or device do.
    """

    def __init__(self) -> None:
        self._state: _State | None = None

    def __len__(self) -> int:
        return 0 if self._state is None else self._state.key.shape[2]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys (B, Hk, L, Ek) and values (B, Hk, L, Ev); returns all there are. Do not write to them."""
        for name, tensor in (("key", key), ("value", value)):
            if not isinstance(tensor, Tensor):
                raise ClearheadError(f"{name} is a {type(tensor).__name__}; expected a tensor (B, Hk, L, E).")
            check_float(tensor, name)
            if tensor.ndim != 4 or tensor.shape[2] != key.shape[2]:
                raise ShapeError(
                    f"{name} has shape {tuple(tensor.shape)}; expected (B, Hk, L, E), keys and values of one length.\n"
                    + columns({"key": tuple(key.shape), "value": tuple(getattr(value, "shape", ()))})
                )
        self._state = self._extended(key, value)
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

        Raises a `ClearheadError` for entries that there are not, and in an empty cache. Cost: a copy.
        """
        if self._state is None:
            raise ClearheadError("the cache is empty: it has no batch to reorder before its first keys.")
        _, key, value = self._state
        indices = placed(_check_indices(indices, key.shape[0]), key.device, "indices")
        self._state = _State(None, key.index_select(0, indices), value.index_select(0, indices))

    def crop(self, length: int) -> None:
        """Keep the first `length` positions.

        >>> import torch
        >>> from clearhead.nn import KeyValueCache
        >>> cache = KeyValueCache()
        >>> _ = cache.append(torch.rand(1, 2, 5, 4), torch.rand(1, 2, 5, 4))
        >>> cache.crop(3)                                           # two drafted tokens were refused
        >>> len(cache)
        3

        Raises a `ClearheadError` for more than there are. Cost: none now; the next keys make a copy of what is kept.
        """
        kept = check_count(length, 0, "length")
        if kept > len(self):
            raise ClearheadError(f"length is {kept}, and the cache holds {len(self)} positions: crop can't add any.")
        if self._state is not None and kept < len(self):
            buffer, key, value = self._state
            self._state = _State(buffer, key[:, :, :kept], value[:, :, :kept])

    def reset(self) -> None:
        """Forget everything, for another batch."""
        self._state = None

    def _extended(self, key: Tensor, value: Tensor) -> _State:
        """What `append` would make of the cache; it stays as it is until it takes this as its state."""
        if self._state is not None:
            _check(self._state, key, value)
        return self._joined(key, value) if torch.is_grad_enabled() else self._written(key, value)

    def _joined(self, key: Tensor, value: Tensor) -> _State:
        if self._state is None:
            return _State(None, key, value)
        return _State(None, torch.cat([self._state.key, key], 2), torch.cat([self._state.value, value], 2))

    def _written(self, key: Tensor, value: Tensor) -> _State:
        length = len(self)
        end = length + key.shape[2]
        buffer = None if self._state is None else self._state.buffer
        # written beyond: a branch of this cache goes on there, or a call that failed
        if buffer is None or buffer.written != length or end > buffer.key.shape[2]:
            buffer = _Buffer(key, value, max(LEAST, 1 << (end - 1).bit_length()))
            if self._state is not None:
                buffer.append(self._state.key, self._state.value)
        buffer.append(key, value)
        return _State(buffer, buffer.key[:, :, :end], buffer.value[:, :, :end])

    def __deepcopy__(self, memo: object) -> KeyValueCache:
        return copy.copy(self)  # as independent as a deep one: nothing given out is written again

    def __repr__(self) -> str:
        if self._state is None:
            return "KeyValueCache(empty)"
        return f"KeyValueCache(length={len(self)}, batch={self._state.key.shape[0]}, heads={self._state.key.shape[1]})"


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
