"""Arrays as tensors, and checks of their type, dtype and shape."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from itertools import repeat
from types import EllipsisType
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypeVar

from clearhead.base.errors import ClearheadError, ShapeError, columns
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.tensor_kind import holds_all_bytes, is_freed, is_readable, materialize_zeros
from clearhead.base.torch_state.torch_private import is_zero_tensor

Array = Tensor | np.ndarray
Integers = Array | Sequence[int] | Sequence[Sequence[int]]
# what is computed from tensors is a tensor, and what is computed from NumPy's arrays an array
ArrayT = TypeVar("ArrayT", Tensor, np.ndarray, default=Tensor)
FAR_BELOW = -1000  # an integer mask of 0 and of numbers up to this one is meant to be added
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def mask_forms(name: str, given: Any) -> str:
    """The code to write for a mask of 0 and 1, or of bool: its dimensions decide which class it needs."""
    cast = f"{name}.bool()" if isinstance(given, Tensor) else f"{name}.astype(bool)"
    return (
        f"One row a sequence, (B, Lk), as a tokenizer's attention_mask is, pass as Padding({cast}); a matrix of "
        f"queries and keys, (…, Lq, Lk), as DenseMask({cast}). Where 1 or True means 'may not attend', write "
        f"{name} == 0 for {cast}."
    )


def is_whole(array: Array) -> bool:
    """Whether an array holds integers."""
    if isinstance(array, np.ndarray):
        return array.dtype.kind in "iu"
    return not (array.is_floating_point() or array.is_complex() or array.dtype == torch.bool)


def refuse_additive(mask: Array, name: str, remedy: str = "mask={}") -> None:
    """Raise for a mask of integers that is meant to be added to the scores: 0, or a number far below 0. `remedy`: what
    to pass, with the float mask in place of {}."""
    numpy = isinstance(mask, np.ndarray)
    if not is_whole(mask) or (isinstance(mask, Tensor) and not is_readable(mask)):
        return
    numbers = torch.from_numpy(np.asarray(mask, np.int64)) if isinstance(mask, np.ndarray) else mask.long()
    low = numbers <= FAR_BELOW
    if bool(low.any()) and bool((low | (numbers == 0)).all()):
        short = name.split()[-1]
        raise ClearheadError(
            f"{name} has dtype {mask.dtype}, shape {tuple(mask.shape)}, and holds 0 and numbers of {FAR_BELOW} and "
            "below: an additive mask.\n"
            f"Pass {remedy.format(f'{short}.astype(query.dtype)' if numpy else f'{short}.float()')}."
        )


def to_tensor(array: Any, name: str) -> Tensor:
    """A tensor over a NumPy array's own memory, or a copy where torch cannot share it; tensors stay as they are."""
    if isinstance(array, Tensor):
        return check_memory(array, name)
    if isinstance(array, np.ma.MaskedArray):
        raise ClearheadError(
            f"{name} is a masked array, whose masked entries have no value; pass {name.split()[-1]}.filled(0).\nOf "
            "inputs hide the keys that have masked entries too: mask=Padding(keep) with a bool keep (B, Lk), for "
            "example keep = ~key.mask.any(-1)."
        )
    if not isinstance(array, np.ndarray):
        raise ClearheadError(
            f"{name} is a {type(array).__name__}; pass a torch tensor or a NumPy array "
            f"(for a list: numpy.asarray({name}))."
        )
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise ClearheadError(
            f"{name} is a NumPy array of dtype {array.dtype}, which holds no real numbers clearhead can compute "
            f"with.\nIf its rows have unequal lengths, pad them and pass mask=Lengths(valid_lens); "
            f"else pass {name}.astype(float)."
        )
    # torch has no negative strides and none between elements
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = array.copy()
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():  # torch warns of read-only memory; clearhead writes to no input
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


def owned(array: Any, name: str) -> Tensor:
    """As `to_tensor`, for tensors that outlive the call: a NumPy array is copied, as writes to it are not counted."""
    return to_tensor(array.copy() if isinstance(array, np.ndarray) else array, name)


def is_causal_bias(tensor: Tensor) -> bool:
    """Whether this is a causal mask of PyTorch's, such as `torch.nn.attention.bias.causal_lower_right(5, 9)`.

    Such a mask is a tensor whose memory was never written.
    """
    if type(tensor) is Tensor:
        return False
    module = sys.modules.get("torch.nn.attention.bias")  # importing it would load PyTorch's compiler
    return module is not None and isinstance(tensor, module.CausalBias)


def check_memory(tensor: Tensor, name: str) -> Tensor:
    """The tensor. Raise where its storage was freed, since a read of it may end the process, or was never written."""
    if is_causal_bias(tensor):
        align = tensor.variant.name.lower() if hasattr(tensor, "variant") else "lower_right"  # a view has none
        raise ClearheadError(f"{name} is a CausalBias, which holds no numbers: pass mask=Causal(), align={align!r}.")
    if is_freed(tensor):
        raise ClearheadError(
            f"{name}, {tensor.dtype}, shape {tuple(tensor.shape)}, has no memory: storage.resize_() freed it, as "
            "fully_shard (FSDP2) frees a layer's parameters after the layer has run. Pass a copy that is made before: "
            "tensor.clone()."
        )
    return tensor


def check_memories(named: Iterable[tuple[str, Tensor | None]]) -> None:
    """The same for several tensors and their names, in less time: what is at work is asked once for all of them, and a
    tensor that comes twice, as that of self-attention, is looked at once."""
    usual, last = get_mode().eager, None
    for name, tensor in named:
        if tensor is None or tensor is last:
            continue
        last = tensor
        plain = usual and type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided
        if not (plain and holds_all_bytes(tensor)):
            check_memory(tensor, name)


Saved = TypeVar("Saved", bound=Sequence[Tensor | None])


def in_memory_still(tensors: Saved) -> Saved:
    """The tensors that a forward pass kept for its backward pass. Raise where the storage of one was freed since."""
    check_memories(zip(repeat("a tensor that attention() reads in its backward pass"), tensors, strict=False))
    return tensors


def check_float(tensor: Tensor, name: str) -> None:
    """Raise unless this is a dense tensor of floating-point numbers, whose storage was not freed."""
    check_kind(tensor, name)
    check_memory(tensor, name)


def check_kind(tensor: Tensor, name: str) -> None:
    """Raise unless this is a dense tensor of floating-point numbers."""
    if tensor.is_nested:
        raise ClearheadError(f"{name} is nested; pass {name}.to_padded_tensor(0.0) and mask=Lengths(valid_lens).")
    if tensor.layout != torch.strided:
        raise ClearheadError(f"{name} has the layout {tensor.layout}; pass a dense tensor: {name}.to_dense().")
    if tensor.dtype not in FLOATS:
        short = name.split()[-1]
        fix = "pass a real tensor" if tensor.is_complex() else f"pass {short}.float()"
        if "int" in str(tensor.dtype) and short != "scores":
            fix += f". Of token ids pass their vectors: nn.Embedding(num_tokens, width)({short})"
        raise ClearheadError(
            f"{name} has dtype {tensor.dtype}, shape {tuple(tensor.shape)}; expected float32, bfloat16, float16 or "
            f"float64: {fix}."
        )


def to_tensor_float(array: Any, name: str) -> Tensor:
    """As `to_tensor`; integer and boolean NumPy arrays become float64."""
    if isinstance(array, Tensor):
        if get_mode().compiled:
            return array
        return materialize_zeros(array) if is_zero_tensor(array) else check_memory(array, name)
    tensor = to_tensor(array, name)
    return tensor if tensor.is_floating_point() else tensor.double()


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The dtype that scores and weights of these inputs have: float32 at least."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_dense(thing: Any) -> TypeGuard[Tensor]:
    """Whether this is a tensor that is neither nested nor sparse."""
    return isinstance(thing, Tensor) and not thing.is_nested and thing.layout is torch.strided


def shown(thing: Any) -> str:
    """The words in which an error names an object that was given where a dense tensor was expected."""
    if thing is None:
        return "None"
    if not isinstance(thing, Tensor):
        return f"a {type(thing).__name__}, {thing!r:.60}"
    if not is_dense(thing):
        return f"a {'nested' if thing.is_nested else thing.layout} tensor of {thing.dtype}"
    return f"{tuple(thing.shape)} of {thing.dtype} on {thing.device}"


def shape_of(array: Any) -> tuple[int | str, ...]:
    """The shape of an array; of a nested one with "j" for the length that varies."""
    if not isinstance(array, Tensor) or not array.is_nested:
        return tuple(array.shape)
    return tuple("j" if dim == array.dim() - 2 else array.size(dim) for dim in range(array.dim()))


def shape_shown(array: Any) -> str:
    """The shape of an array, in an error: see `shape_of`."""
    return str(shape_of(array)).replace("'", "")


def is_numpy(**arrays: Any) -> bool:
    """Whether the caller works in NumPy; a mixture is an error."""
    count = [isinstance(array, np.ndarray) for array in arrays.values()].count(True)
    if 0 < count < len(arrays):
        listed = ", ".join(f"{name} is a {type(array).__name__}" for name, array in arrays.items())
        raise ClearheadError(f"{listed}.\nPass all as NumPy arrays or all as tensors: torch.from_numpy(array).")
    return count > 0


def check_shape(tensor: object, spec: str | Sequence[int | str | EllipsisType | None]) -> dict[str, int]:
    """Check a shape, and get the sizes by name.

    >>> import torch, clearhead as ch
    >>> ch.check_shape(torch.zeros(2, 3, 6), (2, 3, 6))
    {}
    >>> ch.check_shape(torch.zeros(2, 3, 6), "B Lq E")
    {'B': 2, 'Lq': 3, 'E': 6}
    >>> ch.check_shape(torch.zeros(2, 3, 6), "..., 6")
    {}

    `tensor`: anything with a `.shape`. `spec`: a tuple, or words separated by spaces or commas; each part is a size, a
    name (the same name twice must be the same size), `_` or None (any size); one `...` stands for any dimensions.
    Returns a dict from each name to its size. Raises `ShapeError`, with both shapes aligned. Cost: O(dimensions).
    """
    if not isinstance(spec, str | list | tuple):
        raise ClearheadError(f"check_shape: spec is {spec!r:.60}; expected a tuple of sizes and names, or a string.")
    given = spec.replace(",", " ").split() if isinstance(spec, str) else ["..." if p is Ellipsis else p for p in spec]
    parts: list[Any] = [int(p) if isinstance(p, str) and p.lstrip("-").isdigit() else p for p in given]
    if not hasattr(tensor, "shape") or getattr(tensor, "is_nested", False):
        raise ClearheadError(f"check_shape takes something with a .shape of numbers; got a {type(tensor).__name__}.")
    got: tuple[int, ...] = tuple(tensor.shape)
    if parts.count("...") > 1:
        raise ShapeError(f"check_shape: {spec!r} has more than one '...'; keep one.")
    if "..." in parts:
        at = parts.index("...")
        parts[at : at + 1] = [None] * (len(got) - len(parts) + 1)
    rows = {"expected": ["_" if p is None else p for p in parts], "got": got}
    if len(parts) != len(got):
        raise ShapeError(f"check_shape: expected {len(parts)} dimensions, got {len(got)}.\n{columns(rows)}")
    sizes: dict[str, int] = {}
    for i, (part, size) in enumerate(zip(parts, got, strict=True)):
        want = sizes.setdefault(part, size) if isinstance(part, str) and part != "_" else part
        if isinstance(want, int) and want != size:
            name = f"{part} = {want}" if isinstance(part, str) else f"{want}"
            raise ShapeError(
                f"check_shape: dimension {i} should be {name}, and is {size}.\n{columns(rows, i - len(got))}"
            )
    return sizes
