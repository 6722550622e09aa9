"""Sums and extremes of a lazy matrix over any of its dimensions, computed from one block of rows at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.base.arrays import to_tensor
from clearhead.inspection.index import Part

if TYPE_CHECKING:
    from clearhead.inspection.matrix import LazyMatrix

NUMBERS = 2**20  # the most numbers of a block, unless one row alone has more

Place = tuple[slice, ...]


def blocks(shape: Sequence[int], most: int = NUMBERS) -> Iterator[Place]:
    """The places of the blocks of a matrix (..., Lq, Lk), in the order of its numbers. A block has whole rows: some
    rows of one head, or some whole heads, or some whole sequences."""
    rows = len(shape) - 2
    side = next((d for d in range(rows) if math.prod(shape[d + 1 :]) <= most), rows)  # the dimension that is cut
    step = max(1, most // max(math.prod(shape[side + 1 :]), 1))
    rest = [slice(0, size) for size in shape[side + 1 :]]
    for outer in itertools.product(*map(range, shape[:side])):
        for start in range(0, shape[side], step):
            yield *(slice(i, i + 1) for i in outer), slice(start, min(start + step, shape[side])), *rest


def filled(part: Part, tile: Callable[..., Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A part of a matrix, in the memory of the result and of one block. `tile` computes a part from four slices."""
    heads, queries, keys = (range(side.stop)[side] for side in (part.heads, part.queries, part.keys))
    batches = [range(batch.stop)[batch] for batch in part.batches]
    found = torch.empty(sum(map(len, batches)), *map(len, (heads, queries, keys)), dtype=dtype, device=device)
    first = 0
    for batch in batches:
        own = found[first : first + len(batch)]
        for place in blocks(own.shape):
            sides = (every[at] for every, at in zip((batch, heads, queries, keys), place, strict=True))
            own[place] = tile(*(slice(side.start, side.stop, side.step) for side in sides))
        first += len(batch)
    return found.reshape(part.shape)


def summed(matrix: LazyMatrix[Any], dims: tuple[int, ...]) -> Tensor:
    """The sum over these dimensions, each kept with size 1. Blocks are added up in float64."""
    if matrix._in_graph():
        return torch.sum(matrix._tensor(), dims, keepdim=True)
    found = _filled(matrix, dims, 0.0, torch.float64)
    for place, block in _read(matrix):
        found[_reduced(place, dims)] += block.sum(dims, keepdim=True)
    return found


def extreme(matrix: LazyMatrix[Any], dims: tuple[int, ...], sign: int) -> Tensor:
    """The largest number (sign 1) or the smallest (sign −1) over these dimensions, each kept with size 1."""
    if matrix._in_graph():
        return sign * (sign * matrix._tensor()).amax(dims, keepdim=True)
    found = _filled(matrix, dims, -math.inf, matrix.dtype)
    for place, block in _read(matrix):
        at = _reduced(place, dims)
        found[at] = torch.maximum(found[at], (sign * block).amax(dims, keepdim=True))
    return sign * found


def extreme_places(matrix: LazyMatrix[Any], dim: int | None, sign: int) -> tuple[Tensor, Tensor]:
    """The largest or smallest numbers along a dimension, which is kept with size 1, and the first place of each. `dim`
    None takes the whole matrix as one row of numbers; both results are then (1,)."""
    along = 0 if dim is None else dim
    if matrix._in_graph():
        tensor = sign * matrix._tensor()
        values, places = (tensor.flatten() if dim is None else tensor).max(along, keepdim=True)
        return sign * values, places
    best = _filled(matrix, None if dim is None else (dim,), -math.inf, matrix.dtype)
    where = torch.zeros(best.shape, dtype=torch.int64, device=best.device)
    seen = 0
    for place, block in _read(matrix):
        start, at = (seen, (slice(0, 1),)) if dim is None else (place[dim].start, _reduced(place, (dim,)))
        values, places = (sign * (block.flatten() if dim is None else block)).max(along, keepdim=True)
        better = (values > best[at]) | (values.isnan() & ~best[at].isnan())
        best[at] = torch.where(better, values, best[at])
        where[at] = torch.where(better, places + start, where[at])
        seen += block.numel()
    return sign * best, where


def _read(matrix: LazyMatrix) -> Iterator[tuple[Place, Tensor]]:
    """Each block, with its place."""
    for place in blocks(matrix.shape):
        with torch.no_grad():
            block = to_tensor(matrix[place], "a block")
        yield place, block


def _filled(matrix: LazyMatrix[Any], dims: tuple[int, ...] | None, value: float, dtype: torch.dtype) -> Tensor:
    """A tensor of the matrix's shape in which these dimensions have size 1; None: (1,)."""
    shape = [1] if dims is None else [1 if d in dims else size for d, size in enumerate(matrix.shape)]
    return torch.full(shape, value, dtype=dtype, device=matrix.device)


def _reduced(place: Place, dims: tuple[int, ...]) -> Place:
    """The place of a block's result when these dimensions are reduced."""
    return tuple(slice(0, 1) if d in dims else side for d, side in enumerate(place))
