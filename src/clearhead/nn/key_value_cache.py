"""The keys and values of the positions that have been decoded."""

from __future__ import annotations

import copy
import zlib
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.arrays import Integers, check_float, check_memory, shown
from clearhead.base.errors import ClearheadError, ShapeError, UnsupportedError
from clearhead.base.numbers import check_count
from clearhead.base.output.text import brief
from clearhead.base.shapes import placed, refuse_fakes
from clearhead.base.torch_state.mode import any_thread_compiles, get_mode
from clearhead.base.torch_state.tensor_kind import has_own_dispatch, is_freed, is_readable, require_all
from clearhead.base.torch_state.versions import digest
from clearhead.nn._cache_state import CacheState, validate_limits
from clearhead.nn._cache_step import CacheStep, extend, validate_counts
from clearhead.nn._options import NORMS
from clearhead.nn.rotary_embedding import RotaryEmbedding


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

    A cache serves one module and one batch: it remembers the module whose keys it holds, and refuses another. A module
    that is called several times in a model's forward (tied weights) needs a cache for each of these calls: with one
    cache the second call sees the keys of the first. `len(cache)` is the length of its longest sequence, and
    `cache.lengths` the length of each, which may differ (`new_lens` of the module). `reorder`, `crop` and `reset`
    choose from its batch and positions. A full buffer is doubled, so that the cost of a step follows the positions
    that it adds; keys that require grad stay in the graph, and each step makes new tensors for them. A position in a
    tensor that was given out is never written again. `copy.copy(cache)` is a branch that grows by itself and shares the
    past;
    `copy.deepcopy(cache)` and a cache from a pickle may go to a copy of the module: one with the same W_k, W_v,
    key_norm and rotary, which are read when the copy is made, and at its first call in eager code. In compiled code a
    step without `new_lens` is one graph, and six such graphs at most serve every length, where the cache is an argument
    of the compiled function. For a cache that the function captures, or that a module holds, the compiler takes its
    length for a constant, and makes a graph for each step: pass `capacity` there. Raises a `ShapeError` where batch,
    heads or widths change, a `ClearheadError` where dtype, device or the module do.

    `capacity`: the number of positions that each sequence has room for; None lets the room grow. With a capacity the
    keys are written in place, into memory that the first call makes, and a later call attends to all `capacity` places,
    of which those beyond each sequence's length are masked. So masks and lengths count `capacity` keys, and a compiled
    step is one graph, `new_lens` included. More positions than the capacity are an error. Keys that need a gradient are
    an error too: decode under `torch.no_grad()`. The weights of a call can be read until the next call writes.
    `window`: the cache holds the last `window` positions of each sequence, and the `first` ones; its capacity is their
    sum. A query sees these alone, in a prompt too, and of these what the mask allows, which is made of `Causal`,
    `SlidingWindow`, `FirstKeys`, `Lengths` and `PrefixLM`. A bias, and a score with `then`, are refused. So texts of
    any length are decoded in the same memory.

    >>> attend, cache = MultiHeadAttention(8, 2).eval(), KeyValueCache(window=3, first=1)
    >>> with torch.no_grad():
    ...     steps = [attend(token, token, token, ch.Causal(), cache=cache) for token in x.split(1, dim=1)]
    ...     windowed = attend(x, x, x, ch.Causal() & (ch.SlidingWindow(before=2) | ch.FirstKeys(1)))
    >>> torch.allclose(torch.cat(steps, 1), windowed, atol=1e-6)
    True

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

    _module: nn.Module | None = None  # the module that made the keys
    _digest: int | None = None  # in a copy: a number made of the weights that made the keys; None: not known
    _made_outside_graph = True  # an exported program keeps no object between its calls

    def __init__(self, capacity: int | None = None, *, window: int | None = None, first: int = 0) -> None:
        self._state: CacheState | None = None
        self._parts: dict[int | str, KeyValueCache] = {}
        self._limits = validate_limits(capacity, window, first)
        self._made_outside_graph = not get_mode().compiled

    @property
    def capacity(self) -> int | None:
        """The number of positions that each sequence has room for; None: as many as there is memory for."""
        return None if self._limits is None else self._limits.capacity

    def of(self, layer: int | str) -> KeyValueCache:
        """Return the part of one layer, a cache of the same capacity and window, made at its first use.

        >>> import torch, clearhead as ch
        >>> from clearhead.nn import KeyValueCache, MultiHeadAttention
        >>> layers, cache = [MultiHeadAttention(8, 2).eval() for _ in range(3)], KeyValueCache(capacity=16)
        >>> x = torch.rand(1, 5, 8)
        >>> with torch.no_grad():
        ...     for number, attend in enumerate(layers):
        ...         x = x + attend(x, x, x, ch.Causal(), cache=cache.of(number))
        >>> cache.crop(3)                                           # of all layers
        >>> cache
        KeyValueCache(parts=3, length=3, batch=1, heads=2, capacity=16)

        `layer`: its number or name, the same at each call. `len`, `lengths`, `reorder`, `crop`, `reset` and copies are
        those of all parts. Raises a `ClearheadError` where the cache holds keys of its own.
        """
        if isinstance(layer, bool) or not isinstance(layer, int | str):
            raise ClearheadError(f"layer is {brief(layer)}; expected the layer's number or name: cache.of(0).")
        if self._state is not None:
            raise ClearheadError(
                f"{self!r} holds the keys of one module already, so it can't have parts for layers. Make another "
                "KeyValueCache() for them."
            )
        if layer not in self._parts:
            part = type(self)()
            part._limits, part._made_outside_graph = self._limits, self._made_outside_graph
            self._parts[layer] = part
        return self._parts[layer]

    def _list_parts(self) -> list[KeyValueCache]:
        """List the caches that hold keys: this one, or its parts."""
        return [one for part in self._parts.values() for one in part._list_parts()] if self._parts else [self]

    def __len__(self) -> int:
        return min(0 if one._state is None else one._state.length for one in self._list_parts())

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """The number of positions that each sequence holds; None where there are no keys yet."""
        states = [one._state for one in self._list_parts()]
        held = [state.list_lengths() for state in states if state is not None]
        # a call that failed between two layers leaves parts that hold more than others
        return tuple(map(min, zip(*held, strict=True))) if len(held) == len(states) else None

    def append(self, key: Tensor, value: Tensor, new_lens: Integers | None = None) -> tuple[Tensor, Tensor]:
        """Add keys (B, Hk, L, Ek) and values (B, Hk, L, Ev); returns all keys and values. Do not write to them.

        `new_lens`: integers (B,), how many of the new positions each sequence keeps, from the first on; they follow the
        positions that it holds. None keeps them all. A returned tensor is undefined beyond `lengths`; with a capacity
        it has `capacity` positions, but for the first call. A cache with a window holds keys in no order of their
        positions: it raises an `UnsupportedError`.
        """
        self._check_whole()
        if self._limits is not None and self._limits.window is not None:
            raise UnsupportedError(
                f"{self!r} holds the keys of a window in turn, in no order of their positions: pass it to a module as "
                "cache=, or append to a KeyValueCache(capacity=...)."
            )
        for name, tensor in (("key", key), ("value", value)):
            if not isinstance(tensor, Tensor) or tensor.ndim != 4 or tensor.shape[2] != key.shape[2]:
                raise ShapeError(
                    f"{name} is {shown(tensor)}; expected a tensor (B, Hk, L, E), keys and values of one length L."
                )
            check_float(tensor, name)
        self._check_new(key, value)
        step = extend(self._state, self._limits, key, value, new_lens)
        self._state = step.state
        return step.key, step.value

    def reorder(self, indices: Tensor) -> None:
        """Keep the batch entries `indices`, integers (N,), in this order; an entry may come several times or never.

        >>> import torch
        >>> from clearhead.nn import KeyValueCache
        >>> cache = KeyValueCache()
        >>> _ = cache.append(torch.rand(3, 2, 5, 4), torch.rand(3, 2, 5, 4))
        >>> cache.reorder(torch.tensor([2, 2, 0, 1]))               # beam search: the hypotheses that go on
        >>> cache
        KeyValueCache(length=5, batch=4, heads=2)

        Raises a `ClearheadError` for entries outside the batch, and in an empty cache. Cost: a copy.
        """
        every = self._list_parts()
        self._restore_overwritten()
        states = [one._state for one in every if one._state is not None]
        if len(states) < len(every):
            raise ClearheadError("the cache is empty: it has no batch to reorder before its first keys.")
        indices = _check_indices(indices, min(state.key.shape[0] for state in states))
        refuse_fakes({"indices": indices, "the cache": states[0].key})
        for one, state in zip(every, states, strict=True):
            one._state = state.select(placed(indices, state.key.device, "indices"))

    def crop(self, length: Integers | int) -> None:
        """Keep the first `length` positions, one number for all sequences, or integers (B,), one for each.

        >>> import torch
        >>> from clearhead.nn import KeyValueCache
        >>> cache = KeyValueCache()
        >>> _ = cache.append(torch.rand(1, 2, 5, 4), torch.rand(1, 2, 5, 4))
        >>> cache.crop(3)                                           # two drafted tokens were refused
        >>> len(cache)
        3

        Raises a `ClearheadError` for more than there are, and for a window that positions have left. Cost: none now;
        without a capacity the next keys make a copy of the kept positions.
        """
        one_each = isinstance(length, list | tuple | range) or (hasattr(length, "shape") and len(length.shape) > 0)
        held = self.lengths or ()
        if one_each:
            kept = tuple(validate_counts(length, "length", None if self.lengths is None else len(held)).tolist())
            fits = all(new <= old for new, old in zip(kept, held or (0,) * len(kept), strict=True))
        else:
            end = check_count(length, 0, "length")
            kept, fits = tuple(min(end, old) for old in held), end <= len(self)
        if not fits:
            most = len(self) if len(set(held)) < 2 else held
            raise ClearheadError(f"length is {length}, and the cache holds {most} positions: crop can't add any.")
        lengths = torch.tensor(kept, dtype=torch.int64, device="cpu")
        self._restore_overwritten()
        every = [(one, one._state.crop(lengths)) for one in self._list_parts() if one._state is not None]
        for one, state in every:
            one._state = state

    def reset(self) -> None:
        """Drop all keys, for another batch."""
        self._state, self._module, self._digest = None, None, None
        for part in self._parts.values():
            part.reset()

    def _check_whole(self) -> None:
        if self._parts:
            raise ClearheadError(
                f"{self!r} has a part for each layer, and was passed whole. Pass the part: cache=cache.of(layer)."
            )

    def _check_new(self, key: Tensor, value: Tensor, by: nn.Module | None = None) -> None:
        """Check new keys and values (B, Hk, L, E) of a module beside those that the cache holds."""
        if self._made_outside_graph and any_thread_compiles() and get_mode().exported:
            raise UnsupportedError(
                "the KeyValueCache was made outside of the exported code, and a program of torch.export keeps no "
                "object between its calls. Write to buffers of keys and values of the module, and call "
                "attention(query, keys, values, valid_lens=lengths): see the guide Exporting."
            )
        state = self._state
        pairs = () if state is None else (("key", key, state.buffer.keys), ("value", value, state.buffer.values))
        for name, new, old in pairs:  # the whole buffer: no view has to be made
            agree = new.shape[:2] == old.shape[:2] and new.shape[3] == old.shape[3]
            if not agree or new.dtype != old.dtype or new.device != old.device:
                raise ShapeError(
                    f"the new {name}s are {shown(new)}, and the cache holds {shown(getattr(state, name))}: batch, key "
                    "heads, width, dtype and device must be the same.\nEach module and each batch needs its own "
                    "KeyValueCache(), and so does a module that was converted."
                )
            if type(new) is not type(old):
                refuse_fakes({f"the new {name}": new, "the cache": old})
        other = by is not None and by is not self._module and self._module is not None
        if by is not None and self._module is None and self._digest is not None and not get_mode().compiled:
            other = hash_key_makers(by) not in (None, self._digest)  # the cache is a copy
        if other:
            raise ClearheadError(
                f"{self!r} holds the keys of another module than this {type(by).__name__}.\n"
                "Make one KeyValueCache() for each layer. For a copy of the module pass copy.deepcopy(cache)."
            )

    def _commit(self, step: CacheStep, by: nn.Module) -> None:
        """Store the step of a call that has succeeded."""
        if step.slots is not None and self._limits is not None:
            old = self._limits.capacity
            step.state.buffer.write(step.slots, step.key[:, :, old:], step.value[:, :, old:])
        self._state, self._module = step.state, by
        if step.state.buffer.overwritten is not None:
            step.state.buffer.overwritten = None

    def _restore_overwritten(self) -> None:
        """Write back what a call that failed has replaced."""
        for one in self._list_parts():
            if one._state is not None:
                one._state.buffer.restore_overwritten()

    def __copy__(self) -> KeyValueCache:
        self._restore_overwritten()
        branch = type(self)()
        branch._state = self._state  # what grows copies its buffer at the next write
        if branch._state is not None and self._limits is not None:
            branch._state = branch._state.clone()
        branch._module, branch._digest, branch._limits = self._module, self._digest, self._limits
        branch._parts = {layer: copy.copy(part) for layer, part in self._parts.items()}
        return branch

    def __deepcopy__(self, memo: object) -> KeyValueCache:
        copied = copy.copy(self)
        for one, other in zip(copied._list_parts(), self._list_parts(), strict=True):
            one.__dict__.update(other.__getstate__(), _state=one._state, _parts={}, _module=None)
        return copied

    def __getstate__(self) -> dict[str, Any]:  # pickle calls it
        # without the module: a copy of it, which has the same weights, may take the copy of the cache
        made = self._digest if self._module is None else hash_key_makers(self._module)
        self._restore_overwritten()
        return {"_state": self._state, "_digest": made, "_limits": self._limits, "_parts": self._parts}

    def __setstate__(self, state: dict[str, Any]) -> None:  # pickle calls it
        self.__dict__.update(state)
        if self._state is not None and torch.is_inference_mode_enabled():  # such tensors can't be written to outside it
            self._state = self._state.clone()

    def __repr__(self) -> str:
        said = [f"parts={len(self._parts)}"] if self._parts else []
        states = [state for one in self._list_parts() if (state := one._state) is not None]
        if len(states) < len(self._list_parts()):
            said.append("empty")
        else:
            if all(state.lengths is None or is_readable(state.lengths) for state in states):
                lengths = self.lengths or ()
                each = "" if len(set(lengths)) < 2 else f"{min(lengths)} to "
                said.append(f"length={each}{len(self)}")
            said.append(f"batch={states[0].key.shape[0]}, heads={states[0].key.shape[1]}")
        if self._limits is not None:
            _, window, first = self._limits
            said.append(f"capacity={self.capacity}" if window is None else f"window={window}, first={first}")
        return f"KeyValueCache({', '.join(said)})"


def _check_indices(indices: Any, batch: int) -> Tensor:
    """Integers (N,) from 0 up to the batch."""
    is_exact = isinstance(indices, Tensor) and not (indices.is_floating_point() or indices.is_complex())
    if not is_exact or indices.dtype == torch.bool or indices.ndim != 1:
        raise ClearheadError(
            f"indices is {shown(indices)}; expected integers (N,), the entries of the batch that are kept: "
            "torch.tensor([0, 0, 2])."
        )
    check_memory(indices, "indices")
    require_all(
        (indices >= 0) & (indices < batch),
        lambda: ClearheadError(
            f"indices holds {int(indices.min())} to {int(indices.max())}, and the cache has a batch of {batch}."
        ),
        "indices: an entry is beyond the cache's batch",
    )
    entries: Tensor = indices.long()
    return entries


def hash_key_makers(module: nn.Module) -> int | None:
    """Return a number made of what makes a module's keys: weights, and settings of norm and rotary.

    None where the weights can't be read. The buffers of a user's rotary are left out: they may be tables that grow.
    """
    w_k, w_v, norm, rotary = (getattr(module, name, None) for name in ("W_k", "W_v", "key_norm", "rotary"))
    tensors = [t for layer in (w_k, w_v, norm) if layer is not None for t in (*layer.parameters(), *layer.buffers())]
    tensors += rotary.parameters() if isinstance(rotary, nn.Module) else ()
    known = all(
        t.layout is torch.strided and not has_own_dispatch(t) and is_readable(t) and not is_freed(t) for t in tensors
    )
    if not tensors or not known:
        return None
    said = [getattr(part, "__qualname__", type(part).__qualname__) for part in (norm, rotary)]
    said += [repr(norm)] if type(norm) in NORMS else []
    if isinstance(rotary, RotaryEmbedding):
        said.append(repr((rotary.dim, rotary.base, rotary.interleaved, rotary.scaling)))
    return hash((*map(digest, tensors), zlib.crc32(repr(said).encode())))  # a text has another hash in each process
