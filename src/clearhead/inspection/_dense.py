"""Methods of a lazy matrix that compute it as a dense one, and the text of its first numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch

SMALL = 8  # the most queries, and keys, of a matrix of several heads that is printed with its numbers
PAIRS = 2**25  # the most pairs of one head that are computed for `print`
HEADS = 4  # the most heads that are printed
METHODS = {  # functions that a lazy matrix computes without making it dense
    **{getattr(torch, name): name for name in ("sum", "mean", "max", "min", "amax", "amin", "argmax", "argmin")},
    torch.matmul: "__matmul__",
}


def make_dense_method(function: Callable[..., Any], reflected: bool = False) -> Callable[..., Any]:
    """Make a method that computes a function of the dense matrix, and of another operand where there is one."""

    def method(self: Any, *other: Any) -> Any:
        return function(*other, self.dense()) if reflected else function(self.dense(), *other)

    return method


def make_array_method(function: Callable[..., Any], reflected: bool = False) -> Callable[..., Any]:
    """Make the same method for arrays of NumPy too, beside which the matrix is an array: PyTorch takes none."""
    of_dense = make_dense_method(function, reflected)

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, np.ndarray):
            return of_dense(self, other)
        return function(other, self.numpy()) if reflected else function(self.numpy(), other)

    return method


Method = TypeVar("Method", bound=Callable[..., Any])
NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim"}
NAMES = {"dim", "keepdim", *NUMPY_NAMES}


def accept_numpy_names(method: Method) -> Method:
    """Let a method take NumPy's `axis` and `keepdims` too, as PyTorch's functions do."""

    @wraps(method)
    def renamed(*args: Any, **named: Any) -> Any:
        return method(*args, **{NUMPY_NAMES.get(name, name): value for name, value in named.items()})

    return cast(Method, renamed)


def with_first_rows(head: str, shape: tuple[int, ...], part: Callable[[Any], Any]) -> str:
    """Return the head, and under it the numbers of one head, or of a small matrix's first heads, if they can be read.

    `part`: computes an index.
    """
    *outer, queries, keys = shape
    small = max(queries, keys) <= SMALL if outer else queries * keys <= PAIRS
    if not small or not math.prod(shape):
        return head
    index: tuple[Any, ...] = (...,)
    written = ""
    if math.prod(outer) > HEADS:
        *zeros, some = *(0 for _ in outer[:-1]), min(outer[-1], HEADS)
        index, written = (*zeros, slice(some), ...), f"[{', '.join([*map(str, zeros), f':{some}'])}]"
    try:
        with torch.no_grad():
            return f"{head}{written}:\n{part(index)!r}"
    except Exception:  # tensors without values, transforms, and errors of a user's class
        return head
