"""What a recording's header may hold, declared once: a check reads one value, and raises for any other.

A file may hold anything. Each check is called with the value, its name and what has been read of the file, and gives
what the value means: of the name of a tensor the tensor, its dtype and its shape checked.
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

EMPTY = 2**24  # of a tensor without numbers the product of its other sizes: the file's bytes do not limit these


class Damaged(ValueError):
    """A value that the header may not hold."""

    def __init__(self, name: str, value: Any, expected: str) -> None:
        shown = f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"{value!r:.60}"
        super().__init__(f"{name} is {shown}; expected {expected}")


class Read:
    """What has been read so far: the tensors by name, the chains of keys, and of one call the sizes by their names."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.chains: list[Any] = []
        self.sizes: dict[str, int] = {}


Check = Callable[[Any, str, Read], Any]


def parsed(text: str) -> Any:
    """JSON without what JSON has not: NaN, infinities, a key twice."""

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
    """A number above 0 whose square is a float above 0 too, as a softcap is."""
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
    """null, which is None, or what `inner` takes."""
    return lambda value, name, read: None if value is None else inner(value, name, read)


def either(on: type, one: Check, other: Check) -> Check:
    """`one` for what JSON has as this type, else `other`."""
    return lambda value, name, read: (one if isinstance(value, on) else other)(value, name, read)


def each(inner: Check) -> Check:
    """A list of any length."""

    def check(value: Any, name: str, read: Read) -> list[Any]:
        if not isinstance(value, list):
            raise Damaged(name, value, "a list")
        return [inner(one, f"{name}[{i}]", read) for i, one in enumerate(value)]

    return check


def row(*inner: Check) -> Check:
    """A list of so many."""

    def check(value: Any, name: str, read: Read) -> list[Any]:
        if not isinstance(value, list) or len(value) != len(inner):
            raise Damaged(name, value, f"a list of {len(inner)}")
        return [one(part, f"{name}[{i}]", read) for i, (one, part) in enumerate(zip(inner, value, strict=True))]

    return check


def fields(**inner: Check) -> Check:
    """An object with these keys and no other; they are read in this order."""

    def check(value: Any, name: str, read: Read) -> dict[str, Any]:
        if not isinstance(value, dict) or value.keys() != inner.keys():
            raise Damaged(name, sorted(value) if isinstance(value, dict) else value, f"an object of {', '.join(inner)}")
        return {key: one(value[key], f"{name}.{key}", read) for key, one in inner.items()}

    return check


def tensor(dtypes: Sequence[torch.dtype], shape: str) -> Check:
    """The name of a tensor of the file, of one of these dtypes.

    `shape`: such as "B|1 H Lq 1". A name is a size: of the one that is read first it is taken, and of others it must be
    the same; "B|1" is that or 1; "n" is any.
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
