"""The mask and the bias of a problem in the forms that the page reads, which are never a whole matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from clearhead.biases.base import Added
from clearhead.problem.problem import Problem
from clearhead.report._words import Shown
from clearhead.report.layer import Array, PageBias, Tiles, tiled
from clearhead.report.statistics import array

EVERY = slice(None)
ONE = slice(0, 1)
Part = Callable[[slice, slice, slice], Tensor]  # heads, queries, keys


def spans_of(problem: Problem, rows: Shown, columns: Shown) -> tuple[Array, Array]:
    """The starts and stops of the spans among the shown keys, (H or 1, Lq) int32."""
    queries, keys = problem.sizes.queries, problem.sizes.keys
    start, stop = (torch.full((1, queries), edge, dtype=torch.int64, device="cpu") for edge in (0, keys))
    spans, before = problem.spans, columns.before()
    if spans is not None:
        start, stop = (edge[0].expand(-1, queries).cpu() for edge in (spans.start, spans.stop))
    heads = max(start.shape[0], stop.shape[0])
    first, last = (rows.of(before[edge.expand(heads, -1).numpy()].astype("int32"), 1) for edge in (start, stop))
    return first, last


def holes_of(problem: Problem, rows: Shown, columns: Shown) -> tuple[Tiles | None, ...]:
    """The pairs inside the hulls of the spans that are not allowed; () where all are."""
    spans, keys = problem.spans, problem.sizes.keys
    if spans is None or spans.plain:
        return ()
    edges = [edge.shape[1] for edge in spans.edges()]
    rest = 1 if spans.residual is None else spans.rest(ONE, EVERY, ONE, ONE).shape[1]

    def part(heads: slice, queries: slice, every: slice) -> Tensor:
        hull = spans._replace(residual=None, gaps=None).keep(ONE, heads, queries, every, keys)
        return (hull & ~spans.keep(ONE, heads, queries, every, keys))[0, 0]

    found = tuple(_tiles(part, problem, rows, columns, 1 if max(*edges, rest) == 1 else problem.sizes.heads))
    return found if any(tiles is not None for tiles in found) else ()


def bias_of(problem: Problem, rows: Shown, columns: Shown) -> PageBias | None:
    """The bias: a number for each distance, where the shown positions are consecutive; a broadcast part; or tiles."""
    added, sizes = problem.bias, problem.sizes
    if added is None:
        return None
    relative = dense = None
    tiles: tuple[Tiles | None, ...] = ()
    by_pair = Added(added.dense, added.relative, added.function)
    if added.relative is not None and rows.even and columns.even:
        (top, height), (left, width) = ((side.places[0], len(side.places)) for side in (rows, columns))
        first = sizes.queries - top - height + left
        relative = _array(added.relative[0, :, first : first + height + width - 1])
        by_pair = by_pair._replace(relative=None)
    if added.dense is not None and 1 in added.dense.shape[2:]:
        dense = _array(added.dense[0])
        dense = dense if dense.shape[1] == 1 else rows.of(dense, 1)
        dense = dense if dense.shape[2] == 1 else columns.of(dense, 2)
        by_pair = by_pair._replace(dense=None)
    if by_pair.tensors or by_pair.function is not None:
        heads = [t.shape[1] for t in by_pair.tensors]
        if by_pair.function is not None:
            heads.append(by_pair.function(ONE, slice(0, sizes.heads), ONE, ONE).shape[1])

        def part(head: slice, queries: slice, keys: slice) -> Tensor:
            return by_pair.tile(ONE, head, queries, keys, sizes)[0, 0].float()

        tiles = tuple(_tiles(part, problem, rows, columns, max(heads)))
        tiles = tiles if any(each is not None for each in tiles) else ()
    found = PageBias(relative, dense, tiles)
    return None if relative is None and dense is None and not tiles else found


def _tiles(part: Part, problem: Problem, rows: Shown, columns: Shown, heads: int) -> Iterator[Tiles | None]:
    """The tiles of each head, computed one band of queries at a time."""
    keys = problem.sizes.keys

    for head in range(heads):

        def band(first: int, last: int, head: slice = slice(head, head + 1)) -> Array:
            wanted = rows.places[first:last]
            low, high = int(wanted[0]), int(wanted[-1]) + 1
            found = part(head, slice(low, high), slice(0, keys)).expand(high - low, keys)
            kept: Array = columns.of(_array(found)[wanted - low], 1)
            return kept

        yield tiled(band, len(rows.places), len(columns.places))


def _array(tensor: Tensor) -> Array:
    """The tensor as float32, or bool, on the host."""
    return array(tensor if tensor.dtype == torch.bool else tensor.float())
