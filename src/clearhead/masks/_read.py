"""The integers that masks are made of, and values that are derived from the tensors of a mask."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import check_memory, is_whole, mask_forms, to_tensor
from clearhead.base.errors import ClearheadError, ShapeError, columns
from clearhead.base.output.text import brief
from clearhead.base.shapes import Sizes
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.tensor_kind import is_on_host, is_plain, is_readable, require_all
from clearhead.base.torch_state.versions import Versions

T = TypeVar("T")
KEPT = "_clearhead_kept"  # the prefix of attributes that hold caches: no user's attribute has it
FEW_ROWS = 16  # up to this many rows a loop takes less time than tensor operations on all rows


def own(tensor: Tensor) -> Tensor:
    """Copy a tensor such that PyTorch counts the writes to the copy, in inference mode too."""
    if get_mode().compiled:
        return tensor.detach().clone()
    with torch.inference_mode(False):
        return tensor.detach().clone()


def derived(mask: Any, tensor: Tensor, derive: Callable[[Tensor], T]) -> T:
    """Return `derive(tensor)` for a tensor of a mask, cached until the tensor is replaced or written to.

    Compiled code reads the cached result.
    """
    before, mode = getattr(mask, "_derived", None), get_mode()
    if before is not None and (mode.compiled or _same(before[0], tensor)):
        found: T = before[1]
        return found
    found = derive(check_memory(tensor, "a tensor of the mask"))
    if not mode.transforms and not mode.traced:  # a tensor of a transform or a trace is not valid outside of it
        mask._derived = None if mode.compiled else Versions([("the mask", tensor)]), found
    return found


def _same(versions: Versions | None, tensor: Tensor) -> bool:
    return versions is not None and versions.known and versions.changed([("the mask", tensor)]) is None


def wrong_shape(name: str, row: tuple[Any, ...], expected: str, sizes: Sizes, hint: str = "") -> ShapeError:
    """Make the error for a tensor of a mask whose shape does not fit the scores.

    `row` is its shape as a row of a table below the scores, "" for other axes.
    """
    rows = {"scores": (*sizes.shown, sizes.queries, sizes.keys), name.split()[-1]: row}
    shape = tuple(size for size in row if size != "")
    return ShapeError(f"{name} has shape {shape}; expected {expected}.\n{columns(rows)}{hint}")


def intervals(keep: Tensor, keys: int) -> tuple[Tensor, Tensor, bool]:
    """Compute the hull [start, stop) of each row, and whether every row fills its hull."""
    if keep.shape[-1] == 1:  # one column broadcasts to every key
        stop = keep[..., 0] * keys
        return torch.zeros_like(stop), stop, True
    if is_readable(keep) and is_plain(keep) and keep.numel() <= FEW_ROWS * keep.shape[-1]:
        return _of_few_rows(keep, keys)
    bytes_ = keep.to(torch.uint8)  # converts to 0 and 1: a bool view of bytes may hold any number for True
    count = keep.sum(-1, dtype=torch.int32)
    start = bytes_.argmax(-1)
    stop = torch.where(count > 0, keys - bytes_.flip(-1).argmax(-1), start)
    if not is_on_host(keep):  # a read of the values would block until the device has finished
        return start, stop, False
    whole = (stop - start == count).all()
    return start, stop, is_readable(whole) and bool(whole)


def _of_few_rows(keep: Tensor, keys: int) -> tuple[Tensor, Tensor, bool]:
    """Compute the same by searches in the bytes of each row.

    It takes a few microseconds: a model that generates makes such a mask for each token.
    """
    # astype makes bytes 0 and 1: a bool view of bytes may hold any number for True
    numbers, found, exact = keep.detach().numpy().astype(np.uint8).tobytes(), [], True
    for row in range(0, len(numbers), keys):
        start = max(numbers.find(1, row, row + keys), row)
        stop = max(numbers.rfind(1, row, row + keys) + 1, start)
        exact = exact and numbers.find(0, start, stop) < 0
        found.append((start - row, stop - row))
    edges = torch.tensor(found, dtype=torch.int64, device="cpu").view(*keep.shape[:-1], 2)
    return edges[..., 0], edges[..., 1], exact


class Known(NamedTuple):
    """The values of lengths on the host."""

    values: Hashable | None  # the shape and the numbers; None if there are many
    longest: int | None  # None if there are no lengths, or the host cannot read them


def known(lengths: Tensor, name: str) -> Known:
    """Read the values of lengths once; raise if one is below 0."""
    values = few_values(lengths)
    if values is not None:
        least, most = min(values[1:], default=0), max(values[1:], default=None)
    elif lengths.numel() and is_readable(lengths):
        least, most = torch.stack(lengths.aminmax()).tolist()
    else:
        return Known(None, None)
    if least < 0:
        raise _below_0(name, least)
    return Known(values, most)


def _below_0(name: str, least: int) -> ClearheadError:
    return ClearheadError(f"{name} holds {least}; expected lengths from 0 to the number of keys.")


def few_values(numbers: Tensor) -> tuple[Any, ...] | None:
    """Read the shape and the values of a small tensor once, for `Mask.signature`; return None for a larger tensor."""
    if numbers.numel() > 64 or not is_readable(numbers):
        return None
    return (tuple(numbers.shape), *numbers.flatten().tolist())


def signature_of(mask: Any) -> Hashable | None:
    """Return the signature of a mask from the values that it has read; None if there are many."""
    values = mask._read().values
    return None if values is None else (type(mask), values)


def as_tensor(numbers: Any, name: str) -> Tensor:
    """Numbers, lists of them, arrays and tensors, as a tensor; an empty list as one of integers."""
    if isinstance(numbers, int | np.integer | list | tuple | range):
        with suppress(ValueError, TypeError):  # rows of unequal lengths, or entries that are no numbers
            numbers = torch.tensor(numbers, device="cpu")
            numbers = numbers if numbers.numel() else numbers.long()
    if not isinstance(numbers, Tensor | np.ndarray) or (isinstance(numbers, Tensor) and numbers.is_nested):
        raise ClearheadError(
            f"{name} is {brief(numbers)}; expected an integer, or integers in rows of one length: a list, array or "
            "tensor."
        )
    return to_tensor(numbers, name.split()[-1])


def check_integers(given: Any, name: str, dims: tuple[int, ...], expected: str) -> Tensor:
    """Return integers as int64; raise for other dtypes and other numbers of dimensions.

    `expected` names the shapes in the error.
    """
    numbers = as_tensor(given, name)
    if not is_whole(numbers) or numbers.ndim not in dims:
        raise ClearheadError(
            f"{name} has dtype {numbers.dtype}, shape {tuple(numbers.shape)}; expected integers {expected}"
        )
    return numbers.detach().long()


def check_lengths(lengths: Any, name: str, read: bool = False) -> Tensor:
    """Return a copy as int64; raise unless it holds integers of at least 0 in at most two dimensions.

    With `read`, the function `known` reads them next, and raises if one is below 0.
    """
    lens = as_tensor(lengths, name)
    if not is_whole(lens):
        short, numbers = name.split()[-1], lens.is_floating_point() and lens.ndim < 2
        raise ClearheadError(
            f"{name} has dtype {lens.dtype}, shape {tuple(lens.shape)}; expected integers: numbers of allowed keys. "
            f"Pass torch.as_tensor({short}).long()."
            + ("" if numbers else f"\nIf it is a mask: {mask_forms('keep', lens)}")
        )
    if lens.ndim > 2:
        raise ShapeError(f"{name} has shape {tuple(lens.shape)}; expected (B,) or (B, Lq).")
    lens = own(lens.detach().long())
    if lens.numel() and not (read and is_readable(lens)):
        require_all(lens >= 0, lambda: _below_0(name, int(lens.min())), f"{name}: a length is 0 or more")
    return lens
