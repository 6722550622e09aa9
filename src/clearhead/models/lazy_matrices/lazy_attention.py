"""Attention weights as a tensor whose parts are computed when they are read."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from clearhead.base.errors import ClearheadError, UnsupportedError, human_bytes
from clearhead.base.torch_state.active import any_autocast
from clearhead.base.torch_state.contexts import without_function_modes, without_tensor_subclasses
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.torch_private import arguments_of, tree_map_only, wrapper_subclass
from clearhead.inspection._dense import with_first_rows
from clearhead.inspection.weights import Weights
from clearhead.models.interception.refused import uncompiled
from clearhead.models.lazy_matrices.of_model import OfModel, PartOfModel

ModelSource = OfModel | PartOfModel
Device = torch.device | None


class Dense:
    """Counts the dense tensors that lazy weights were made into, for as long as their memory is held.

    `made`: how many dense tensors, and `bytes`: how many bytes in all, since the process began. `standing`: the bytes
    that are held now.
    """

    def __init__(self) -> None:
        self.made = self.bytes = 0
        self._lock = threading.RLock()  # one tensor is made at a time
        self._held: list[tuple[StorageWeakRef, int]] = []
        self._most_held = 0  # the length of the list at which freed memory is looked for
        self._total = 0  # bytes held, or freed but not yet looked for

    @property
    def standing(self) -> int:
        with self._lock:
            self._held = [one for one in self._held if not one[0].expired()]  # type: ignore[no-untyped-call]
            self._total = sum(size for _, size in self._held)
            self._most_held = 2 * len(self._held) + 100
            return self._total

    def make(self, size: int, most: int | None, shape: tuple[int, ...], make: Callable[[], Tensor]) -> Tensor:
        """The result of `make`, of `size` bytes. Raises a `ClearheadError` where there would be more than `most`."""
        with self._lock:
            limit = math.inf if most is None else most
            if (self._total + size > limit or len(self._held) > self._most_held) and self.standing + size > limit:
                held = f", and {human_bytes(self._total)} of dense weights stand already" if self._total else ""
                raise ClearheadError(
                    f"{shape} attention weights would be made dense, {human_bytes(size)}{held}: above max_bytes = "
                    f"{human_bytes(most or 0)} of lazy_attentions.\nIndex what is needed, such as attention[:, 0] or "
                    "attention[0, 0, -1]; take a reduction, such as attention.weights.entropy(), .topk(5) or "
                    ".pool(256), or attention @ value; or pass max_bytes=…, None for no limit."
                )
            made = make()
            self.made += 1
            self.bytes += size
            self._total += size
            self._held.append((StorageWeakRef(made.untyped_storage()), size))  # type: ignore[no-untyped-call]
        return made


DENSE = Dense()


class LazyAttention(Tensor):
    """The attention weights of one layer: a tensor (B, H, Lq, Lk) whose parts are computed when they are read.

    >>> import torch, clearhead as ch
    >>> from transformers import LlamaConfig, LlamaModel
    >>> model = LlamaModel(LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    ...                                num_attention_heads=8, num_key_value_heads=2)).eval()
    >>> with torch.no_grad(), ch.models.lazy_attentions(model):
    ...     attention = model(input_ids=torch.arange(10)[None], output_attentions=True).attentions[1]
    >>> attention
    LazyAttention((1, 8, 10, 10), torch.float32)
    >>> attention[0, 3, 7].shape                          # one exact row; nothing else is computed
    torch.Size([10])
    >>> attention[:, 3].mean(1).shape                     # a head is lazy too, and dense where an operation needs it
    torch.Size([1, 10])
    >>> attention.weights.entropy().shape                 # all that `ch.weights` offers
    torch.Size([1, 8, 10])

    `ch.models.lazy_attentions` makes it. An index by integers and slices computes that part alone. An index of
    sequences and heads stays lazy. `detach`, `contiguous`, and `to` (`cpu`, `float`, …) stay lazy too: numbers are
    later computed in that dtype, on that device. `attention @ value` runs as attention does. Any other operation of
    PyTorch or NumPy is given `dense()`, which is made anew each time. Gradients reach the model's queries and keys. It
    is read-only: writes raise an `UnsupportedError`, and results are copies. `retain_grad()`, hooks and
    `torch.autograd.grad(loss, attention)` raise an `UnsupportedError` too, since the model's output is not computed
    from these weights; `Weights.gradients` has that gradient.
    """

    _source: ModelSource
    _kept: tuple[bool, bool]
    _most: int | None
    _known: Weights | None

    @staticmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> LazyAttention:
        raise ClearheadError("LazyAttention is made by a model inside of `with ch.models.lazy_attentions(model):`.")

    @property
    def weights(self) -> Weights:
        """These weights as `ch.weights` returns them, (B, H, Lq, Lk): reductions and scores in O(Lq + Lk) memory."""
        if self._known is None:
            self._known = Weights(self._source)
        return self._known

    def dense(self) -> Tensor:
        """All weights as an ordinary tensor. Raises a `ClearheadError` beyond the limit of `lazy_attentions`."""
        if _by_graph_alone(self):
            with without_tensor_subclasses():
                return self.clone()
        return _whole(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        device = "" if self.device.type == "cpu" else f", device='{self.device}'"
        grad = ", requires_grad=True" if self.requires_grad else ""
        head = f"LazyAttention({tuple(self.shape)}, {self.dtype}{device}{grad})"
        return with_first_rows(head, tuple(self.shape), lambda index: torch.clone(self[index]))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _of_the_outside(func) or any(map(_by_graph_alone, _lazy_in((args, kwargs)))):
            with without_tensor_subclasses():
                return func(*args, **kwargs)
        _refuse(func, args, kwargs)
        if func in LAZILY and isinstance(args[0], LazyAttention):
            found = LAZILY[func](func, *args, **kwargs)
            if found is not NotImplemented:
                return found
        made: dict[int, Tensor] = {}  # an argument that is given twice is made dense once

        def dense(lazy: LazyAttention) -> Tensor:
            if id(lazy) not in made:
                made[id(lazy)] = lazy.dense() if func not in LIKE else _blank(lazy).expand(lazy.shape)
            return made[id(lazy)]

        args, kwargs = tree_map_only(LazyAttention, dense, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Serves operations that are not reached by PyTorch's functions, such as in a compiled function."""
        kwargs = kwargs or {}
        arguments = arguments_of(func)
        named = [*zip(arguments, args, strict=False)]
        named += [(argument, kwargs[argument.name]) for argument in arguments if argument.name in kwargs]
        for argument, given in named:
            if argument.alias_info is not None and argument.alias_info.is_write and _lazy_in(given):
                raise _read_only(str(func))
        if func is torch.ops.aten.detach.default:
            return _lazily(args[0], _detached(args[0]._source))
        with torch.no_grad():
            args, kwargs = tree_map_only(LazyAttention, _whole, (args, kwargs))
        return func(*args, **kwargs)


def make_lazy(
    source: ModelSource,
    kept: tuple[bool, bool],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    most: int | None,
) -> LazyAttention:
    """The lazy tensor of a source. `kept`: whether it has a dimension of sequences, and one of heads. `most`: the bytes
    that may be dense at a time, None for no limit."""
    source = source if torch.is_grad_enabled() else _detached(source)
    state = {"_source": source, "_kept": kept, "_most": most, "_known": None}
    with without_function_modes():
        if not source.learnt:
            return _wrapper(shape, dtype, device, state)
        made: LazyAttention = _Node.apply((shape, dtype, device, state), *source.learnt)  # type: ignore[no-untyped-call]
        return made


def _wrapper(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, state: dict[str, Any]) -> LazyAttention:
    made: LazyAttention = wrapper_subclass(LazyAttention, shape, dtype=dtype, device=device)
    made.__dict__.update(state)
    return made


class _Node(torch.autograd.Function):
    """The node of lazy weights in the graph: it has their gradients where no function of PyTorch uses them."""

    @staticmethod
    def forward(ctx: Any, made: tuple[Any, ...], *learnt: Tensor) -> LazyAttention:
        ctx.source, ctx.learnt = made[-1]["_source"], learnt
        return _wrapper(*made)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            dense = Weights(ctx.source).dense(None)
            grad = grad.reshape(dense.shape).to(dense)
            found = torch.autograd.grad(dense, ctx.learnt, grad, create_graph=again, allow_unused=True)
        return None, *found


# --------------------------------------------------------------------------- functions whose results stay lazy


def _lazily(
    self: LazyAttention, source: ModelSource | None = None, dtype: torch.dtype | None = None, device: Device = None
) -> LazyAttention:
    shape = tuple(self.shape)
    return make_lazy(source or self._source, self._kept, shape, dtype or self.dtype, device or self.device, self._most)


def _detached(source: ModelSource) -> ModelSource:
    return source.without_graph() if source.learnt else source


def _detach(func: Any, self: LazyAttention) -> Any:
    return _lazily(self, _detached(self._source))


def _to(func: Any, self: LazyAttention, *args: Any, **kwargs: Any) -> Any:
    found = func(_blank(self), *args, **kwargs)
    if not found.is_floating_point():
        return NotImplemented
    same = found.dtype == self.dtype and found.device == self.device
    return self if same else _lazily(self, None, found.dtype, found.device)


def _unbind(func: Any, self: LazyAttention, dim: int = 0) -> Any:
    return tuple(self[i] for i in range(len(self))) if dim in (0, -self.ndim) else NotImplemented


def _squeeze(func: Any, self: LazyAttention, *dims: Any) -> Any:
    """The weights without a dimension of one sequence, or of one head."""
    place = {(0,): 0, (1,): 1, (-4,): 0, (-3,): 1}.get(dims) if self.ndim == 4 else None
    if place is None or self.shape[place] != 1:
        return NotImplemented
    return self[0] if place == 0 else self[:, 0]


def _matmul(func: Any, self: LazyAttention, other: Any) -> Any:
    """The product with a value: computed as attention, where this is less work than the matrix."""
    if not isinstance(other, Tensor) or self.ndim != 4 or other.ndim != 4 or any_autocast():
        return NotImplemented
    here = self.weights.problem.query
    same = other.dtype == self.dtype == here.dtype and other.device == self.device == here.device
    fits = all(b in (1, a) for a, b in zip(self.shape[:2], other.shape[:2], strict=True))
    if not same or not fits or other.shape[2] != self.shape[3] or other.shape[3] >= self.shape[3]:
        return NotImplemented
    return self.weights @ (other.dense() if isinstance(other, LazyAttention) else other)


def _getitem(func: Any, self: LazyAttention, index: Any) -> Any:
    items = list(index) if isinstance(index, tuple) else [index]
    if any(item is not Ellipsis and not isinstance(item, slice) and type(item) is not int for item in items):
        return NotImplemented
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1 or len(items) - len(dots) > self.ndim:
        return NotImplemented  # PyTorch's own error
    at = dots[0] if dots else len(items)
    items[at : at + 1] = [slice(None)] * (self.ndim - len(items) + len(dots))
    if any(isinstance(item, slice) and (item.step or 1) < 1 for item in items):
        return NotImplemented
    shape = [len(range(size)[item]) for size, item in zip(self.shape, items, strict=True) if isinstance(item, slice)]
    rest = iter(items)
    sides = [next(rest) if kept else 0 for kept in self._kept] + list(rest)
    if sides[2:] == [slice(None)] * 2 and 0 not in shape:
        kept = isinstance(sides[0], slice), isinstance(sides[1], slice)
        chosen = [_as_slice(side, size) for side, size in zip(sides, self.weights.shape, strict=False)]
        part = PartOfModel(self._source, chosen[0], chosen[1])
        return make_lazy(part, kept, tuple(shape), self.dtype, self.device, self._most)
    slices = tuple(map(_as_slice, sides, self.weights.shape))
    return _computed(self, lambda: self.weights[slices].reshape(shape), tuple(shape))


def _as_slice(side: int | slice, size: int) -> slice:
    found = range(size)[side]
    return slice(found.start, found.stop, found.step) if isinstance(found, range) else slice(found, found + 1)


T = Tensor
LAZILY: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((T.to, T.float, T.double, T.half, T.bfloat16, T.cpu, T.cuda), _to),
    **dict.fromkeys((T.detach, torch.detach, T.data.__get__), _detach),  # type: ignore[attr-defined]
    **dict.fromkeys((T.unbind, torch.unbind), _unbind),
    **dict.fromkeys((T.squeeze, torch.squeeze), _squeeze),
    **dict.fromkeys((T.matmul, T.__matmul__, torch.matmul), _matmul),
    **dict.fromkeys((T.clone, torch.clone), lambda func, self, **kwargs: func(self.dense(), **kwargs)),
    T.contiguous: lambda func, self, *args, **kwargs: self,
    T.__iter__: lambda func, self: (self[i] for i in range(len(self))),
    T.__getitem__: _getitem,
}
# Functions that read only shape, dtype and device.
LIKE = {torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like}
LIKE |= {T.new_zeros, T.new_ones, T.new_empty, T.new_full}
OUTSIDE = {T.size, T.dim, T.ndimension, T.numel, T.nelement, T.element_size, T.stride, T.storage_offset, T.__len__}
OUTSIDE |= {T.is_contiguous, T.is_floating_point, T.is_complex, T.is_signed, T.is_inference, T.get_device, T.__hash__}
OUTSIDE |= {torch.numel, torch.is_floating_point, torch.is_complex, torch.is_inference}
OUTSIDE |= {T.requires_grad_, T.requires_grad.__set__, T.grad.__set__}  # type: ignore[attr-defined, union-attr]
INSIDE = {"T", "H", "mT", "mH", "real", "imag", "data"}


def _of_the_outside(func: Any) -> bool:
    """Whether a function reads or sets an attribute that is known without the numbers."""
    if getattr(func, "__name__", "") == "__get__":
        return getattr(func, "__self__", func).__name__ not in INSIDE
    return func in OUTSIDE


# ------------------------------------------------------------------------------ functions that compute numbers


def _whole(self: LazyAttention) -> Tensor:
    return _computed(self, lambda: self.weights.dense(None), tuple(self.shape))


def _computed(self: LazyAttention, compute: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
    if get_mode().compiled:
        reason = "lazy attention weights are computed in eager code; compile with fullgraph=False"
        return uncompiled(_computed, reason)(self, compute, shape)

    def make() -> Tensor:
        with without_function_modes():
            return compute().reshape(shape).to(self.device, self.dtype)

    return DENSE.make(torch.Size(shape).numel() * self.dtype.itemsize, self._most, shape, make)


def _blank(self: LazyAttention) -> Tensor:
    """A number of the same dtype and device, which expands to any shape."""
    return torch.zeros((1,) * self.ndim, dtype=self.dtype, device=self.device)


def _lazy_in(things: Any) -> list[LazyAttention]:
    found: list[LazyAttention] = []
    tree_map_only(LazyAttention, found.append, things)
    return found


def _by_graph_alone(self: LazyAttention) -> bool:
    """Whether it is in a graph that is not the model's: a leaf, by `requires_grad_()`, or the result of a checkpoint.

    PyTorch then follows its operations, which reach `__torch_dispatch__`.
    """
    return self.requires_grad and not self._source.learnt


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = getattr(func, "__name__", str(func))
    if name in ("retain_grad", "register_hook", "register_post_accumulate_grad_hook") or (
        func is torch.autograd.grad and _lazy_in((args[1:2], kwargs.get("inputs")))
    ):
        raise UnsupportedError(
            f"lazy attention weights have no gradient of their own ({name}): the model's output is not computed from "
            "them. For the gradient of a loss by them watch the model, and use call.weights.gradients(value, grad)."
        )
    if name == "data_ptr":
        raise UnsupportedError("lazy attention weights have no memory of their own; use attention.dense().data_ptr().")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__", "__delete__")
    in_place = in_place or (name.startswith("__i") and name not in ("__iter__", "__invert__", "__index__", "__int__"))
    if (in_place and _lazy_in(args[:1])) or _lazy_in(kwargs.get("out")):
        raise _read_only(name)


def _read_only(name: str) -> UnsupportedError:
    return UnsupportedError(f"lazy attention weights are read-only ({name}): write to a copy, attention.clone().")
