"""Which part of the matrix an index names."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.output.text import brief
from clearhead.base.shapes import Sizes
from clearhead.problem.problem import Problem
from clearhead.problem.regions import of_heads


class OutOfRange(ClearheadError, IndexError):
    """An index past the end: an IndexError too, which ends a `for` loop over the weights."""


DENSE_BYTES = 2**28


class Heads(NamedTuple):
    """Whole heads of a matrix: slices of the folded batch and of the heads, and the dimensions that the caller sees."""

    batch: slice
    heads: slice
    leading: tuple[int, ...] | None
    heads_last: bool  # whether the last leading dimension is the heads

    def of(self, problem: Problem) -> Problem:
        """The problem of these heads."""
        problem = of_heads(problem, self.batch, self.heads)
        return problem._replace(sizes=self.shown(problem.sizes))

    def shown(self, sizes: Sizes) -> Sizes:
        """The sizes of these heads, with the dimensions that the caller sees."""
        return sizes._replace(leading=self.leading, heads_last=self.heads_last)


@dataclass(frozen=True)
class Part:
    """A rectangle of the matrix: some sequences (each a slice of the batch), heads, queries and keys."""

    batches: list[slice]
    heads: slice
    queries: slice
    keys: slice
    whole: bool  # every pair
    shape: tuple[int, ...]  # the shape that the index gives
    matrix: Heads | None  # the heads that an index of numbers chooses, if it leaves queries and keys alone

    def restore(self, parts: list[Tensor]) -> Tensor:
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, 0)
        return joined.reshape(self.shape)


def parse(index: Any, shape: torch.Size, sizes: Sizes) -> Part:
    """A basic index as slices of (B, H, Lq, Lk), and the shape it gives. Any other index is an error."""
    items = list(index) if isinstance(index, tuple) else [index]
    real = sum(item is not None and item is not Ellipsis for item in items)
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1 or real > len(shape):
        raise ClearheadError(f"the index {index!r} has too many parts for weights of shape {tuple(shape)}.")
    at = dots[0] if dots else len(items)
    items[at : at + 1] = [slice(None)] * (len(shape) - real)
    slices: list[slice] = []
    result: list[int] = []
    for item in items:
        if item is None:
            result.append(1)
            continue
        size = shape[len(slices)]
        if isinstance(item, slice):
            try:
                found = range(size)[item]
            except (TypeError, ValueError) as error:
                raise ClearheadError(f"the index {index!r} has a wrong slice: {error}.") from None
            if found.step < 0:
                raise ClearheadError(f"the index {index!r} has a negative step; index forwards, then flip.")
            result.append(len(found))
        else:
            found = _one(item, size, index, shape)
        slices.append(slice(found.start, max(found.stop, found.start), found.step))
    *outer, queries, keys = slices
    heads = outer.pop() if sizes.has_heads else slice(0, 1)
    folded = sizes.shown[:-1] if sizes.has_heads else sizes.shown
    rows = [0]  # of the folded batch
    for size, one in zip(folded, outer, strict=True):
        rows = [row * size + i for row in rows for i in range(size)[one]]
    batches = [outer[0]] if len(outer) == 1 else [slice(row, row + 1) for row in rows]
    whole = all(range(size)[s] == range(size) for size, s in zip(shape, slices, strict=True))
    chosen = None
    sequences = slice(rows[0], rows[-1] + 1, rows[1] - rows[0] if len(rows) > 1 else 1) if rows else slice(0, 0)
    # numbers in the midst of three leading dimensions may choose sequences that are no slice
    if _chooses_heads(items) and (not rows or [*range(rows[-1] + 1)[sequences]] == rows):
        last = sizes.has_heads and isinstance(items[-3], slice)
        chosen = Heads(sequences, heads, tuple(result[:-2]), last)
    return Part(batches or [slice(0, 0)], heads, queries, keys, whole, tuple(result), chosen)


def _chooses_heads(items: Sequence[Any]) -> bool:
    """Whether an index has a number for a leading dimension, and else full slices alone."""
    *outer, queries, keys = items
    full = [isinstance(item, slice) and item == slice(None) for item in outer]
    numbers = [not isinstance(item, slice) and item is not None for item in outer]
    return any(numbers) and all(map(operator.or_, full, numbers)) and queries == slice(None) == keys


def _one(item: Any, size: int, index: Any, shape: torch.Size) -> range:
    try:
        if isinstance(item, bool | np.bool_ | np.ndarray | Tensor | list):
            raise TypeError
        place = operator.index(item)
    except TypeError:
        raise ClearheadError(
            f"the index {brief(index, 200)} is not basic: use integers, slices, ... and None, or index dense()."
        ) from None
    if not -size <= place < size:
        raise OutOfRange(f"the index {index!r} is out of range for weights of shape {tuple(shape)}.")
    return range(place % size, place % size + 1)
