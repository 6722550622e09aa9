"""The common class of the lazy matrices: of weights, of their gradients, and of differences of weights."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias, cast, overload

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import ArrayT, to_tensor
from clearhead.base.errors import ClearheadError, UnsupportedError, human_bytes
from clearhead.base.numbers import check_count, check_flag
from clearhead.base.output.text import brief, said
from clearhead.base.shapes import Sizes
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.torch_private import tree_map_only
from clearhead.inspection import _dense
from clearhead.inspection._dense import accept_numpy_names, make_array_method, make_dense_method
from clearhead.inspection.by_blocks import NUMBERS, extreme, extreme_places, filled, summed
from clearhead.inspection.index import DENSE_BYTES, Heads, Part, parse

Place: TypeAlias = int | slice | EllipsisType | None
Operand: TypeAlias = "float | Tensor | np.ndarray | LazyMatrix[Any]"
Nested: TypeAlias = "list[float] | list[Nested]"
Index: TypeAlias = Place | tuple[Place, ...]


class NoSuchMethod(ClearheadError, AttributeError):
    """A method of tensors that a lazy matrix does not have: an AttributeError too, so that `hasattr` says no."""


def _writes(function: Callable[..., Any]) -> bool:
    """Whether a function of PyTorch writes to its first argument. Compiled code raises for such calls by itself."""
    name = "" if get_mode().compiled else getattr(function, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


class LazyMatrix(ABC, Generic[ArrayT]):
    """A matrix (..., Lq, Lk) that is computed where it is looked at.

    `matrix[index]` computes a part, and `sum`, `mean`, `max`, `min`, `argmax` and `argmin` a block at a time. All other
    operators and functions of PyTorch and NumPy are given `dense()`. An index that leaves queries and keys alone, and
    chooses heads by numbers, gives the matrix of these heads. A class says how a part is computed (`_tile`).
    """

    _sizes: Sizes
    _most: int | None = DENSE_BYTES  # the most bytes that `dense()` makes without being told
    _limits_parts = False  # whether an index, too, gives at most DENSE_BYTES
    _instead = "Index the part you need (w[..., -1, :])"  # the advice where the whole would be too large

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @abstractmethod
    def _tile(self, batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
        """The numbers (b, h, q, k) at four slices of (B, H, Lq, Lk)."""

    @abstractmethod
    def _of_heads(self, heads: Heads) -> Self:
        """The matrix of some heads."""

    @abstractmethod
    def _head(self) -> str:
        """The text of `repr` before the numbers. It may raise."""

    def _in_graph(self) -> bool:
        """Whether results of the whole have gradients, or are followed by a transform or the compiler."""
        mode = get_mode()
        return mode.compiled or mode.operations_only

    def _out(self, tensor: Any) -> ArrayT:
        """A result, in the kind that the inputs had."""
        return cast(ArrayT, tensor)

    @property
    def shape(self) -> torch.Size:
        """(..., Lq, Lk)."""
        sizes: Sizes = self._sizes
        return torch.Size((*sizes.shown, sizes.queries, sizes.keys))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        return self._sizes.device

    @overload
    def size(self, dim: None = None) -> torch.Size: ...
    @overload
    def size(self, dim: int) -> int: ...
    def size(self, dim: int | None = None) -> torch.Size | int:
        """The shape, or the size of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """How many numbers the whole has."""
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[ArrayT | Self]:
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, index: slice | EllipsisType | tuple[slice, ...] | None) -> ArrayT: ...
    @overload
    def __getitem__(self, index: Index) -> ArrayT | Self: ...
    def __getitem__(self, index: Index) -> ArrayT | Self:
        """The exact numbers at any basic index: integers, slices, `...` and None. The whole is as `dense()`.

        Numbers for leading dimensions alone, such as `w[0]`, `w[0, 3]`, `w[:, 3]` and `w[..., 3, :, :]`, give the lazy
        matrix of these heads, of the shape that the tensor would have: nothing is computed yet.
        """
        part = parse(index, self.shape, self._sizes)
        if part.matrix is not None:
            found = self._of_heads(part.matrix)
            found._most = None
            return found
        size = math.prod(part.shape) * self.dtype.itemsize
        if self._limits_parts and size > DENSE_BYTES:
            raise ClearheadError(
                f"the part at {brief(index)} would be {tuple(part.shape)}, {human_bytes(size)}, above "
                f"{human_bytes(DENSE_BYTES)}. Index the part you need."
            )
        return self.dense().reshape(part.shape) if part.whole else self._out(self._part(part))

    def dense(self, max_bytes: int | EllipsisType | None = ...) -> ArrayT:
        """The whole matrix (..., Lq, Lk), as a tensor or an array.

        `max_bytes`: raise a `ClearheadError` above so many bytes; None for no limit. Without it the limit is 256 MiB,
        and heads that an index chose have none.
        """
        max_bytes = self._most if max_bytes is ... else max_bytes
        if max_bytes is not None and not (isinstance(max_bytes, float) and max_bytes == math.inf):
            check_count(max_bytes, 0, "max_bytes", most=math.inf)
        size = math.prod(self.shape) * self.dtype.itemsize
        if max_bytes is not None and size > max_bytes:
            raise ClearheadError(
                f"dense() would make {tuple(self.shape)}, {human_bytes(size)}, above max_bytes = "
                f"{human_bytes(max_bytes)}.\n{self._instead}, or pass max_bytes=None."
            )
        return self._out(self._whole())

    def _whole(self) -> Tensor:
        return self._part(parse(..., self.shape, self._sizes))

    def _part(self, part: Part, tile: Callable[..., Tensor] | None = None) -> Tensor:
        """The numbers of a part, in the shape that its index gives. `tile`: another function in place of `_tile`."""
        tile = tile or self._tile
        if math.prod(part.shape) <= NUMBERS or self._in_graph():
            return part.restore([tile(batch, part.heads, part.queries, part.keys) for batch in part.batches])
        return filled(part, tile, self.dtype, self.device)

    def _tensor(self) -> Tensor:
        return to_tensor(self.dense(), "the matrix")

    # ---------------------------------------------------------------------------------------------- over dimensions

    @accept_numpy_names
    def sum(self, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> ArrayT:
        """The sum over a dimension, over several, or over all (None): the sum of `w[:]`, in O(Lq + Lk) memory.

        `dim`: such as -1 for the keys and -2 for the queries; `keepdim`: keep them with size 1. Raises a
        `ClearheadError` for a dimension that is not there. Cost: that of all rows. Where gradients are wanted, and in
        transforms, the whole is made dense first. This holds for `mean`, `max` and the others too.
        """
        dims = self._dims(dim)
        return self._squeezed(summed(self, dims).to(self.dtype), dims, keepdim)

    @accept_numpy_names
    def mean(self, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> ArrayT:
        """The mean over a dimension, over several, or over all. Arguments and cost: as `sum`."""
        dims = self._dims(dim)
        count = math.prod([self.shape[d] for d in dims])  # compiled code gives math.prod no generator
        return self._squeezed((summed(self, dims) / count).to(self.dtype), dims, keepdim)

    @accept_numpy_names
    def amax(self, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> ArrayT:
        """The largest number over a dimension, over several, or over all. Arguments and cost: as `sum`."""
        return self._extreme(dim, keepdim, 1)

    @accept_numpy_names
    def amin(self, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> ArrayT:
        """The smallest number over a dimension, over several, or over all. Arguments and cost: as `sum`."""
        return self._extreme(dim, keepdim, -1)

    @overload
    def max(self, dim: None = None, keepdim: bool = False) -> ArrayT: ...
    @overload
    def max(self: LazyMatrix[np.ndarray], dim: int, keepdim: bool = False) -> np.ndarray: ...
    @overload
    def max(self: LazyMatrix[Tensor], dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]: ...
    @accept_numpy_names
    def max(self, dim: int | None = None, keepdim: bool = False) -> ArrayT | np.ndarray | tuple[Tensor, Tensor]:
        """The largest number of all; with `dim` the largest along a dimension, and their places: (values, indices).

        Of equal numbers the first is named. Matrices of NumPy arrays give the values alone, as NumPy does.
        """
        return self._extreme(None, keepdim, 1) if dim is None else self._pair(dim, keepdim, 1)

    @overload
    def min(self, dim: None = None, keepdim: bool = False) -> ArrayT: ...
    @overload
    def min(self: LazyMatrix[np.ndarray], dim: int, keepdim: bool = False) -> np.ndarray: ...
    @overload
    def min(self: LazyMatrix[Tensor], dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]: ...
    @accept_numpy_names
    def min(self, dim: int | None = None, keepdim: bool = False) -> ArrayT | np.ndarray | tuple[Tensor, Tensor]:
        """The smallest number of all; with `dim` the smallest along a dimension, and their places. See `max`."""
        return self._extreme(None, keepdim, -1) if dim is None else self._pair(dim, keepdim, -1)

    @accept_numpy_names
    def argmax(self, dim: int | None = None, keepdim: bool = False) -> ArrayT:
        """Where the largest number stands along a dimension, the first of equal ones; None: in the flattened whole."""
        return self._place(dim, keepdim, 1)

    @accept_numpy_names
    def argmin(self, dim: int | None = None, keepdim: bool = False) -> ArrayT:
        """Where the smallest number stands along a dimension. See `argmax`."""
        return self._place(dim, keepdim, -1)

    def _dims(self, dim: int | tuple[int, ...] | None, some: bool = False) -> tuple[int, ...]:
        """Dimensions from 0 on. `some`: raise where one of them has size 0."""
        count = self.ndim
        given = tuple(dim) if isinstance(dim, tuple | list) else () if dim is None else (dim,)
        dims = tuple(check_count(d, -count, "dim", most=count - 1) % count for d in given) or tuple(range(count))
        if some and 0 in (self.shape[d] for d in dims):
            raise ClearheadError(f"a matrix of shape {tuple(self.shape)} has no largest number along dim={brief(dim)}.")
        return dims

    def _extreme(self, dim: int | tuple[int, ...] | None, keepdim: bool, sign: int) -> ArrayT:
        dims = self._dims(dim, some=True)
        return self._squeezed(extreme(self, dims, sign), dims, keepdim)

    def _pair(self, dim: int, keepdim: bool, sign: int) -> Any:
        (one,) = self._dims((dim,), some=True)
        values, places = (self._squeezed(t, (one,), keepdim) for t in extreme_places(self, one, sign))
        kind = torch.return_types.max if sign > 0 else torch.return_types.min
        return kind((values, places)) if isinstance(values, Tensor) else values

    def _place(self, dim: int | None, keepdim: bool, sign: int) -> ArrayT:
        dims = self._dims(None if dim is None else (dim,), some=True)
        places = extreme_places(self, None if dim is None else dims[0], sign)[1]
        return self._squeezed(places.reshape([1] * self.ndim) if dim is None else places, dims, keepdim)

    def _squeezed(self, tensor: Tensor, dims: tuple[int, ...], keepdim: bool) -> ArrayT:
        """A result without the dimensions that were reduced to size 1, unless they are kept."""
        return self._out(tensor if check_flag(keepdim, "keepdim") else tensor.squeeze(dims))

    # ---------------------------------------------------------------------------------------------- as a tensor

    # NumPy leaves operators to the matrix, as it does to a tensor: a number of NumPy's would detach the result
    __array_priority__ = 1000
    if TYPE_CHECKING:

        def __add__(self, other: Operand) -> ArrayT: ...
        def __neg__(self) -> ArrayT: ...

        __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __add__
        __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __rmatmul__ = __add__
        __lt__ = __le__ = __gt__ = __ge__ = __add__
        __pos__ = __abs__ = __neg__

        def __matmul__(self, value: ArrayT | LazyMatrix[ArrayT]) -> ArrayT: ...

    else:
        __add__, __radd__ = make_dense_method(operator.add), make_array_method(operator.add, True)
        __sub__, __rsub__ = make_dense_method(operator.sub), make_array_method(operator.sub, True)
        __mul__, __rmul__ = make_dense_method(operator.mul), make_array_method(operator.mul, True)
        __truediv__, __rtruediv__ = make_dense_method(operator.truediv), make_array_method(operator.truediv, True)
        __floordiv__, __rfloordiv__ = make_dense_method(operator.floordiv), make_array_method(operator.floordiv, True)
        __mod__, __rmod__ = make_dense_method(operator.mod), make_array_method(operator.mod, True)
        __pow__, __rpow__ = make_dense_method(operator.pow), make_array_method(operator.pow, True)
        __matmul__, __rmatmul__ = make_dense_method(operator.matmul), make_array_method(operator.matmul, True)
        __lt__, __le__, __gt__, __ge__ = map(make_array_method, (operator.lt, operator.le, operator.gt, operator.ge))
        __eq__, __ne__ = make_array_method(operator.eq), make_array_method(operator.ne)
        __pos__, __neg__, __abs__ = map(make_dense_method, (operator.pos, operator.neg, operator.abs))
        __contains__ = make_dense_method(operator.contains)
    __hash__ = object.__hash__

    def numpy(self) -> np.ndarray:
        """The whole as a NumPy array, up to the size that `dense()` allows; without gradients."""
        return self.__array__()

    def tolist(self) -> Nested:
        """The whole as lists of numbers, up to the size that `dense()` allows."""
        return cast(Nested, self.dense().tolist())

    def item(self) -> float:
        """The one number of a matrix that has one. Raises a `ClearheadError` for any other."""
        if self.numel() != 1:
            raise ClearheadError(
                f"one number is wanted, and this matrix is {tuple(self.shape)}: index it, such as w[..., 0, 0], or "
                "reduce it, such as (w[:] > 0.5).any(). To ask whether there are weights write `w is not None`."
            )
        return float(self.dense().item())

    __float__ = item

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        dense = self.dense()
        array = dense if isinstance(dense, np.ndarray) else dense.detach().cpu().numpy()
        return array if dtype is None else array.astype(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        """For `torch.as_tensor` and others that take no subclass: without it they would read a list of tensors."""
        return self._tensor().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0, dtype=self.dtype, device=self.device).__dlpack_device__()

    def __array_function__(self, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """NumPy's functions are given arrays: otherwise NumPy would call the methods here with other arguments."""
        args, kwargs = tree_map_only(LazyMatrix, np.asarray, (args, kwargs))
        return function(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """PyTorch's functions are given `dense()`, except functions with a method here."""
        kwargs = kwargs or {}
        first, *others = args or (None,)
        if function is Tensor.matmul and isinstance(first, Tensor) and get_mode().compiled:
            raise UnsupportedError("PyTorch's compiler swaps the sides of w @ value: write torch.matmul(w, value).")
        named = _dense.METHODS.get(function)
        # torch.max(a, b) compares two
        pairwise = named != "__matmul__" and any(isinstance(other, Tensor | LazyMatrix) for other in others)
        if named and isinstance(first, LazyMatrix) and not pairwise and kwargs.keys() <= _dense.NAMES:
            return getattr(first, named)(*others, **kwargs)
        if isinstance(kwargs.get("out"), LazyMatrix) or (isinstance(first, LazyMatrix) and _writes(function)):
            raise UnsupportedError(f"a lazy matrix is read-only ({function.__name__}): write to a copy, w.dense().")
        args, kwargs = tree_map_only(LazyMatrix, LazyMatrix._tensor, (args, kwargs))
        return function(*args, **kwargs)

    if not TYPE_CHECKING:  # a type checker knows which attributes there are

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)  # a property raised: show its own error
            kind = type(self).__name__
            if name.startswith("_") or not (hasattr(Tensor, name) or hasattr(np.ndarray, name)):
                raise AttributeError(f"{kind!r} object has no attribute {name!r}")
            call = "(…)" if callable(getattr(Tensor, name, getattr(np.ndarray, name, None))) else ""
            raise NoSuchMethod(
                f"{kind} has no {name} of its own, since it is computed where it is looked at. Write w[:].{name}{call} "
                f"for the whole as a tensor, or take the part you need: w[..., 0, :].{name}{call}."
            )

    # ---------------------------------------------------------------------------------------------- in print

    def __repr__(self) -> str:
        """Shape, dtype, and how it is computed; under it the numbers, as PyTorch prints them: of one head, up to 2²⁵
        pairs, and of the first four of several heads of at most 8 × 8."""
        return said(self, self._printed)

    def _printed(self) -> str:
        try:
            head = self._head()
        except Exception as error:  # its tensors were written to, or a part of the user raises
            reason = str(error).partition("\n")[0]
            return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}, not to be computed: {reason})"
        return _dense.with_first_rows(head, self.shape, self.__getitem__)
