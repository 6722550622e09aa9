"""What is checked of any argument: that it is an array, floating-point numbers, a whole number, a flag."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead._errors import ClearheadError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOST = 2**40  # of a size, a count or a position: more could not be held


def to_tensor(array: Any, name: str) -> Tensor:
    """A tensor over a NumPy array's own memory (a copy only where torch cannot address it); tensors pass."""
    if isinstance(array, Tensor):
        return array
    if isinstance(array, np.ma.MaskedArray):
        raise ClearheadError(f"{name} is a masked array; pass {name}.data, and what it masks as mask=DenseMask(keep).")
    if not isinstance(array, np.ndarray):
        raise ClearheadError(
            f"{name} is a {type(array).__name__}; pass a torch tensor or a NumPy array "
            f"(for a list: numpy.asarray({name}))."
        )
    if array.dtype.kind not in "fiub":
        raise ClearheadError(
            f"{name} is a NumPy array of dtype {array.dtype}, which holds no real numbers clearhead can compute "
            f"with.\nIf its rows have unequal lengths, pad them and pass mask=Lengths(valid_lens); "
            f"else pass {name}.astype(float)."
        )
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        raise ClearheadError(f"{name} has dtype {array.dtype}; pass {name}.astype('float64').")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    # torch has no negative strides and none between elements, and warns of read-only memory
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = array.copy()
    elif not array.flags.writeable:
        array = _writable_view(array)
    return torch.from_numpy(array)


def owned(array: Any, name: str) -> Tensor:
    """As `to_tensor`, for what outlives the call: a NumPy array is copied, since its writes cannot be seen."""
    return to_tensor(array.copy() if isinstance(array, np.ndarray) else array, name)


class _Memory:
    """Memory that NumPy takes as an array, and what keeps it alive."""

    def __init__(self, interface: dict[str, Any], owner: np.ndarray) -> None:
        self.__array_interface__ = interface
        self.owner = owner


def _writable_view(array: np.ndarray) -> np.ndarray:
    """The same memory without the read-only flag's warning; clearhead never writes to its inputs."""
    try:
        interface = dict(array.__array_interface__)
        address, _ = interface["data"]

        return np.asarray(_Memory({**interface, "data": (address, False)}, array))
    except (TypeError, ValueError):
        return array.copy()


def check_float(tensor: Tensor, name: str) -> None:
    if tensor.is_nested:
        raise ClearheadError(f"{name} is nested; pass {name}.to_padded_tensor(0.0) and mask=Lengths(valid_lens).")
    if tensor.layout != torch.strided:
        raise ClearheadError(f"{name} has the layout {tensor.layout}; pass a dense tensor: {name}.to_dense().")
    if tensor.dtype not in FLOATS:
        fix = f"pass {name}.float()" if not tensor.is_complex() else "pass a real tensor"
        raise ClearheadError(
            f"{name} has dtype {tensor.dtype}, shape {tuple(tensor.shape)}; expected float32, bfloat16, "
            f"float16 or float64: {fix}."
        )


def check_count(number: Any, least: int, name: str, most: float = MOST) -> int:
    """A whole number, Python's or NumPy's, of at least `least` and at most `most`."""
    try:
        if isinstance(number, bool | np.bool_):
            raise TypeError
        count = operator.index(number)
    except TypeError:
        count = least - 1
    if count < least:
        raise ClearheadError(f"{name} is {number!r:.60}; expected a whole number, {least} or more.")
    if count > most:
        raise ClearheadError(f"{name} is {count:,}; expected {most:,} at most.")
    return count


def check_flag(flag: Any, name: str) -> bool:
    """True or False, Python's or NumPy's."""
    if not isinstance(flag, bool | np.bool_):
        raise ClearheadError(f"{name} is {flag!r:.60}; expected True or False.")
    return bool(flag)
