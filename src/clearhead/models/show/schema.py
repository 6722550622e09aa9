"""Checks of a recording's header: each check reads one value, and raises an error for a value that is not allowed.

A file may hold anything. A check is called with a value, its name, and the parts of the file that were read before. It
returns the meaning of the value: for the name of a tensor, the tensor, after its dtype and its shape are checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.base.arrays import FLOATS
from clearhead.base.numbers import MOST

EMPTY = 2**24  # the largest product of the other sizes of an empty tensor, which the file's bytes do not limit


class Damaged(ValueError):
    """A value that the header may not hold."""

    def __init__(self, name: str, value: Any, expected: str) -> None:
        shown = f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"{value!r:.60}"
        super().__init__(f"{name} is {shown}; expected {expected}")


class Read:
    """The parts read so far: the tensors by name, the chains of keys, and the named sizes of one call."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.chains: list[Any] = []
        self.sizes: dict[str, int] = {}


Check = Callable[[Any, str, Read], Any]


def parsed(text: str) -> Any:
    """The value of strict JSON text: NaN, infinities and repeated keys are errors."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("an object of its header has a key twice")
        return found

    def refuse(name: str) -> None:
        raise ValueError(f"its header has the number {name}")

    return json.loads(text, object_pairs_hook=once, parse_constant=refuse)


def whole(least: int = 0, most: int = MOST) -> Check:
    """A whole number."""

    def check(value: Any, name: str, read: Read) -> int:
        if type(value) is not int or not least <= value <= most:
            raise Damaged(name, value, f"a whole number, {least:,} to {most:,}")
        return value

    return check


def number(value: Any, name: str, read: Read) -> float:
    """A finite number."""
    if type(value) not in (int, float) or abs(value) > torch.finfo(torch.float64).max or not math.isfinite(value):
        raise Damaged(name, value, "a finite number")
    return float(value)


def positive(value: Any, name: str, read: Read) -> float:
    """A softcap: a number above 0 whose square, as a float, is above 0 too."""
    found = number(value, name, read)
    if not found > 0 or not 0 < found * found < math.inf:
        raise Damaged(name, value, "a number above 0")
    return found


def text(value: Any, name: str, read: Read) -> str:
    if not isinstance(value, str):
        raise Damaged(name, value, "a text")
    return value


def flag(value: Any, name: str, read: Read) -> bool:
    if not isinstance(value, bool):
        raise Damaged(name, value, "true or false")
    return value


def one_of(*values: str) -> Check:
    def check(value: Any, name: str, read: Read) -> str:
        if not isinstance(value, str) or value not in values:
            raise Damaged(name, value, " or ".join(map(repr, values)))
        return value

    return check


def optional(inner: Check) -> Check:
    """Either null, which means None, or a value that `inner` takes."""
    return lambda value, name, read: None if value is None else inner(value, name, read)


def either(on: type, one: Check, other: Check) -> Check:
    """The check `one` for values of this type in JSON, and `other` for all others."""
    return lambda value, name, read: (one if isinstance(value, on) else other)(value, name, read)


def each(inner: Check) -> Check:
    """A list of any length, each of whose values `inner` takes."""

    def check(value: Any, name: str, read: Read) -> list[Any]:
        if not isinstance(value, list):
            raise Damaged(name, value, "a list")
        return [inner(one, f"{name}[{i}]", read) for i, one in enumerate(value)]

    return check


def row(*inner: Check) -> Check:
    """A list with one value for each of these checks."""

    def check(value: Any, name: str, read: Read) -> list[Any]:
        if not isinstance(value, list) or len(value) != len(inner):
            raise Damaged(name, value, f"a list of {len(inner)}")
        return [one(part, f"{name}[{i}]", read) for i, (one, part) in enumerate(zip(inner, value, strict=True))]

    return check


def fields(**inner: Check) -> Check:
    """An object with exactly these keys, which are read in this order."""

    def check(value: Any, name: str, read: Read) -> dict[str, Any]:
        if not isinstance(value, dict) or value.keys() != inner.keys():
            raise Damaged(name, sorted(value) if isinstance(value, dict) else value, f"an object of {', '.join(inner)}")
        return {key: one(value[key], f"{name}.{key}", read) for key, one in inner.items()}

    return check


def tensor(dtypes: Sequence[torch.dtype], shape: str) -> Check:
    """The name of a tensor of the file, of one of these dtypes.

    `shape`: such as "B|1 H Lq 1". A name stands for a size: the first tensor with the name sets it, and all later ones
    must have the same. "B|1" stands for this size or 1, and "n" for any size.
    """

    def check(value: Any, name: str, read: Read) -> Tensor:
        found = read.tensors.get(value) if isinstance(value, str) else None
        if found is None:
            raise Damaged(name, value, "the name of a tensor of the file")
        if found.dtype not in dtypes:
            raise Damaged(name, found, " or ".join(map(str, dtypes)))
        if not found.numel() and math.prod(max(size, 1) for size in found.shape) > EMPTY:
            raise Damaged(name, found, "numbers, or smaller sizes")
        dims = shape.split()
        if found.ndim != len(dims) or not all(
            _fits(dim, size, read) for dim, size in zip(dims, found.shape, strict=False)
        ):
            known = {dim: size for dim, size in read.sizes.items() if dim in shape.replace("|", " ").split()}
            raise Damaged(name, found, f"({shape.replace(' ', ', ')})" + (f", {known}" if known else ""))
        return found

    return check


def _fits(dim: str, size: int, read: Read) -> bool:
    if dim == "n" or dim == str(size):
        return True
    expected, _, or_one = dim.partition("|")
    return (or_one == "1" == str(size)) or read.sizes.setdefault(expected, size) == size


FLOAT, WHOLE, BOOL = FLOATS, (torch.int64,), (torch.bool,)
