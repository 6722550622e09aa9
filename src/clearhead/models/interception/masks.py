"""A model's own mask tensors as masks and biases, each converted once."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from clearhead.base.kept import Table, size_of
from clearhead.base.shapes import Align, Sizes, broadcasts
from clearhead.base.torch_state.contexts import without_autocast
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.tensor_kind import is_on_host, is_readable
from clearhead.base.torch_state.torch_private import uncounted, version
from clearhead.base.torch_state.versions import digest
from clearhead.base.user_functions.rules import Rule
from clearhead.biases.base import wide
from clearhead.masks._read import intervals
from clearhead.masks.base import Mask
from clearhead.masks.dense import DenseMask
from clearhead.masks.intervals import Intervals
from clearhead.masks.mask_function import MaskFunction
from clearhead.problem.problem import Problem, make_problem
from clearhead.problem.visible import Visible, resolve
from clearhead.scores.dot import Dot

Shape = tuple[int, int, int, int]  # (B, H, Lq, Lk)


class Made:
    """The pairs that a mask tensor allows, found once for all layers that are given the tensor.

    `keys`: the keys that the one query of each sequence sees, where they are one interval, the same for all. Where a
    token is decoded with a static cache, they are those that the cache holds, without the room for later tokens.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._seen = _counted(tensor)
        # on a CPU the numbers themselves are kept: writes through `.data`, or by NumPy to its memory, are not counted
        self._copy = tensor.detach().clone() if is_on_host(tensor) and is_readable(tensor) else None
        self.keys = _same_keys(_true_where_allowed(tensor)) if tensor.shape[-2] == 1 else None
        self._mask: tuple[Mask | None] | None = None

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor is as it was when it was read."""
        copy = self._copy
        if copy is None or copy.dtype != tensor.dtype or copy.device != tensor.device:
            return copy is None and _counted(tensor) == self._seen
        return torch.equal(copy, tensor)

    def mask(self, tensor: Tensor) -> Mask | None:
        """The normal form of the tensor, which is given again: it has this object as an attribute."""
        if self._mask is None:
            self._mask = (compact(_true_where_allowed(tensor)),)
        return self._mask[0]


def keep_made(mask: Tensor) -> Tensor:
    """The mask tensor, which has its `Made` as an attribute. Tensors of inference mode do not count writes: of such a
    tensor it is a copy, which counts them."""
    if uncounted(mask):
        with torch.inference_mode(False):
            mask = mask.clone()
    mask.clearhead = Made(mask)  # type: ignore[attr-defined]
    return mask


def made_of(mask: Tensor | None, shape: Shape) -> Made | None:
    """The `Made` of this tensor for a call of these sizes, (B, H, Lq, Lk). None where the tensor has none, was written
    to since, or does not fit the call, of which `attention` tells.

    In compiled code a tensor has no such attribute.
    """
    found: Made | None = None if mask is None or get_mode().compiled else getattr(mask, "clearhead", None)
    if found is None or mask is None or not broadcasts(mask.shape, shape):
        return None
    return found if found.holds(mask) else None


def _counted(tensor: Tensor) -> tuple[int, int]:
    """How often the tensor was written to, and the address of its memory, which `tensor.data = other` changes."""
    return version(tensor), tensor.data_ptr() if is_readable(tensor) else 0


def _true_where_allowed(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask == 0


def _same_keys(keep: Tensor) -> slice | None:
    if not keep.numel() or not is_on_host(keep):  # the host would wait for the answer
        return None
    start, stop, exact = intervals(keep, keep.shape[-1])
    found = set(zip(start.flatten().tolist(), stop.flatten().tolist(), strict=True)) if exact else set()
    first, last = found.pop() if len(found) == 1 else (0, 0)
    return slice(first, last) if first < last else None


@dataclass(frozen=True, eq=False)
class Recorded:
    """A model's mask tensors as a mask and a bias.

    `mask`: which query may see which key. `bias`: numbers that are added to the scores. `uniform`, bool (B or 1,
    H or 1, Lq, 1): queries to which a finite float mask allows no key, so that the backend gave the same weight to
    every key. `align`: where query 0 stands, if the mask depends on it. `by_rule`: whether a function of the model
    makes the mask, from tensors that may be written to later.
    """

    mask: Mask | None = None
    bias: Tensor | None = None
    uniform: Tensor | None = None
    align: Align = None
    by_rule: bool = False
    _lowered: dict[Sizes, Visible] = field(default_factory=dict)  # layers that share a mask share its normal form

    def visible(self, sizes: Sizes) -> Visible | None:
        """The mask in its normal form."""
        if self.mask is None:
            return None
        if sizes not in self._lowered:
            found = resolve(self.mask, sizes, as_written=False)
            if not self.by_rule:  # it reads copies, and no other code writes to them
                found = found._replace(spans=found.spans._replace(reads=()))
            self._lowered[sizes] = found
        return self._lowered[sizes]

    def plus(self, other: Recorded) -> Recorded:
        """Both masks at once: the pairs that both allow, and the sum of their biases."""
        mask = self.mask if other.mask is None else other.mask if self.mask is None else self.mask & other.mask
        bias = self.bias if other.bias is None else other.bias if self.bias is None else self.bias + other.bias
        uniform = self.uniform if other.uniform is None else other.uniform
        if self.uniform is not None and other.uniform is not None:
            uniform = self.uniform | other.uniform
        if bias is not None and uniform is not None:
            bias = bias.masked_fill(uniform, 0.0)
        align = self.align if other.align is None else other.align
        return Recorded(mask, bias, uniform, align, self.by_rule or other.by_rule)

    def with_sinks(self, keys: int) -> Recorded:
        """The same for a call with sinks, where a query without an allowed key gives all its weight to the sink."""
        if self.uniform is None:
            return self
        stop = torch.where(self.uniform[..., 0], 0, keys)
        rest = Recorded(self.mask, align=self.align, by_rule=self.by_rule)
        return Recorded(Intervals(torch.zeros_like(stop), stop), self.bias).plus(rest)

    def with_gradient(self, added: Tensor) -> Recorded:
        """The same with the gradient of `added`, whose values the bias has already: a 0 with this gradient is added."""
        zero = _four(added - added.detach()).float()
        zero = zero.masked_fill(zero.isnan(), 0.0)  # −∞ less −∞
        if self.uniform is not None:
            zero = zero.masked_fill(self.uniform, 0.0)
        return replace(self, bias=zero if self.bias is None else self.bias + zero)

    def problem(
        self, query: Tensor, key: Tensor, score: Dot, sinks: Tensor | None, value: Tensor | None = None
    ) -> Problem:
        """The normal form of a call with these masks. Where there are sinks, the masks are those of `with_sinks`."""
        with without_autocast(query.device):
            problem = make_problem(
                query if self.uniform is None else query.masked_fill(self.uniform, 0.0),
                key,
                key if value is None else value,  # three plain tensors are checked at less cost
                score=score,
                bias=self.bias,
                sinks=sinks,
                # the default: with a key/value cache the last query stands at the last key
                align="lower_right" if self.align is None else self.align,
            )
        return problem._replace(value=None if value is None else problem.value, visible=self.visible(problem.sizes))

    def tensors(self) -> list[Tensor | None]:
        """The tensors by which two of these are compared."""
        mask = self.mask
        edges = (mask.start, mask.stop, None) if isinstance(mask, Intervals) else (None, None)
        return [*edges, mask.keep if isinstance(mask, DenseMask) else None, self.bias, self.uniform]


class MaskStore:
    """Mask tensors that were converted, each once: models give one mask to many layers.

    A bool tensor is a mask. A float tensor is added to the scores: entries at or below half of its dtype's least
    value mean "not allowed", and if all other entries are 0 there is no bias. The given tensors are not kept.
    """

    def __init__(self, differentiable: bool = False) -> None:
        self._differentiable = differentiable  # whether a bias keeps its gradient
        self.counted = True  # whether writes to given tensors are counted; else one memory may hold several masks
        self._lock = threading.Lock()  # a model may run in several threads
        self._known: dict[Any, tuple[list[StorageWeakRef], Recorded]] = {}
        self._distinct = Table(8)  # by shapes and types, and a number of its own; each text may have another shape
        self._rules: list[MaskFunction] = []

    def rule(self, fn: Rule) -> MaskFunction:
        """The mask of a function: one for all layers that are given the function, since it keeps its results."""
        with self._lock:
            known = [one for one in self._rules if one.fn is fn]
            found = known[0] if known else MaskFunction(fn)
            self._rules = [*(one for one in self._rules if one is not found), found][-8:]
            return found

    def convert(self, mask: Tensor | None, bias: Tensor | None = None, nonzero_blocks: bool = False) -> Recorded:
        """The mask and the bias, converted. `bias`: a position bias that the model passes beside its mask.

        `nonzero_blocks`: every entry but 0 in the mask means "not allowed", as in PyTorch's own modules.
        """
        given = [tensor for tensor in (mask, bias) if tensor is not None]
        if not given:
            return Recorded()
        if self._differentiable and torch.is_grad_enabled() and any(t.requires_grad for t in given):
            return converted(_allowed(mask) if nonzero_blocks else mask, bias)  # its graph serves one call
        mask, bias = (None if t is None else t.detach() for t in (mask, bias))
        with self._lock, torch.no_grad():
            key = (_identity(mask), _identity(bias), nonzero_blocks)
            known = self._known.get(key) if self.counted else None
            if known is not None and not any(w.expired() for w in known[0]):  # type: ignore[no-untyped-call]
                return known[1]
            found = self._shared(converted(_allowed(mask) if nonzero_blocks else mask, bias))
            if self.counted and not any(map(uncounted, given)):  # writes to these are not counted
                # entries of freed tensors go: a generation makes a mask at each step, and each text of a corpus has one
                self._known = {k: (s, r) for k, (s, r) in self._known.items() if not any(w.expired() for w in s)}  # type: ignore[no-untyped-call]
                storages = [StorageWeakRef(t.untyped_storage()) for t in given]  # type: ignore[no-untyped-call]
                self._known[key] = (storages, found)
            return found

    def _shared(self, new: Recorded) -> Recorded:
        """An equal mask from before, if there is one: some models make the same mask anew for every layer."""
        kind = tuple(None if t is None else (tuple(t.shape), t.dtype, t.device) for t in new.tensors())
        for key in [key for key in self._distinct if key[0] == kind]:
            old: Recorded = self._distinct.use(key)
            if all(a is None or torch.equal(a, b) for a, b in zip(old.tensors(), new.tensors(), strict=True)):  # type: ignore[arg-type]
                return old
        self._distinct.keep((kind, id(new)), new, size_of(new.tensors()))
        return new


def _identity(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    written = 0 if uncounted(tensor) else version(tensor)
    # on a CPU the memory may be NumPy's, or another process's, whose writes are not counted
    numbers = digest(tensor) if tensor.device.type == "cpu" and is_readable(tensor) else 0
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, written, numbers


def _allowed(mask: Tensor | None) -> Tensor | None:
    """Where the mask is 0, bool; a dimension that repeats one row is computed once."""
    if mask is None:
        return None
    once = mask.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]
    return once == 0


def converted(mask: Tensor | None, bias: Tensor | None) -> Recorded:
    """A mask tensor and a position bias beside it, converted without a cache: see `MaskStore`."""
    added = None if bias is None else wide(_four(bias))
    keep, uniform = None, None
    if mask is not None:
        mask = _four(mask)
        keep = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        if mask.dtype != torch.bool:
            rest = wide(mask).masked_fill(~keep, 0.0)
            added = rest if added is None else added + rest
        blind = ~keep.any(-1, keepdim=True)
        # SDPA gives 0 where a bool mask, or a mask of minus infinities, allows nothing. A finite least value is added
        # to every score alike; models with a position bias turn a bool mask into such a mask.
        least_is_finite = bias is not None if mask.dtype == torch.bool else bool((mask > -torch.inf).all())
        if least_is_finite and bool(blind.any()):
            uniform, keep = blind, keep | blind
            added = None if added is None else added.masked_fill(blind, 0.0)
    if added is not None and not bool(added.any()):
        added = None
    return Recorded(None if keep is None else compact(keep), None if added is None else added.clone(), uniform)


def _four(mask: Tensor) -> Tensor:
    """The mask as (B or 1, H or 1, Lq or 1, Lk): PyTorch broadcasts masks from the right."""
    return mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape)) if mask.ndim < 4 else mask


def compact(keep: Tensor) -> Mask | None:
    """None where every pair is allowed, `Intervals` where every row is an interval, else a `DenseMask`."""
    if bool(keep.all()):
        return None
    start, stop, exact = intervals(keep, keep.shape[-1])
    if exact and keep.shape[-1] > 1:
        return Intervals(start, stop)
    return DenseMask(keep.clone())
