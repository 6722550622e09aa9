"""A mask's map of blocks for the kernels: which tiles of queries attend to which panels of keys.

It also holds the residual as bits. The map is computed once for each mask that is not one interval for each query, and
cached with the mask's normal form.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from clearhead.base.arrays import shown
from clearhead.base.errors import ShapeError
from clearhead.base.shapes import Sizes, broadcasts
from clearhead.base.torch_state.tensor_kind import is_plain
from clearhead.masks.base import Spans
from clearhead.problem.problem import Problem

ROWS, PANEL = 48, 64  # the queries of a tile and the keys of a panel, as in csrc/problem.h
STRIP = 2**24  # pairs of a residual in memory at once
# The most queries of one call of a residual: the call covers every key that any of them may attend to.
STRIP_ROWS = 8 * ROWS
KEEP_BYTES = 2**26  # a map of more bytes is computed for some queries at a time, and not cached

EVERY = slice(None)


def blocks_of(problem: Problem, kernels: Any) -> Any:
    """Return the map of a problem's mask; None if one interval for each query describes the mask."""
    visible = problem.visible
    if visible is None or visible.spans.plain or not all(problem.sizes.shape):
        return None
    if "blocks" not in visible.memo:
        visible.memo["blocks"] = _made(visible.spans, problem.sizes, kernels)
    return visible.memo["blocks"]


def rows_at_once(problem: Problem) -> int:
    """Return how many queries the map may hold at once: all of them, or a whole number of tiles."""
    visible, sizes = problem.visible, problem.sizes
    if visible is None or visible.spans.residual is None or not all(sizes.shape):
        return sizes.queries  # intervals need no bits, and few runs of blocks
    if math.prod(sizes.shape) <= 8 * KEEP_BYTES:
        return sizes.queries
    if "bytes" not in visible.memo:  # the most bytes of the map for one query, in all sequences and heads that differ
        one = visible.spans.rest(*(slice(0, n) for n in (sizes.batch, sizes.heads, 1, sizes.keys)))
        visible.memo["bytes"] = max(1, one.numel() // 8)
    row: int = visible.memo["bytes"]
    return sizes.queries if sizes.queries * row <= KEEP_BYTES else max(1, KEEP_BYTES // row // ROWS) * ROWS


def _made(spans: Spans, sizes: Sizes, kernels: Any) -> Any:
    edges = (spans.start, spans.stop, *(spans.gaps or (None, None)))
    known = [edge.shape for edge in spans.edges()]
    step, first, found, hulls = sizes.queries, 0, None, spans.host()
    if spans.residual is not None:
        step = STRIP // max(1, math.prod(sizes.shape) // sizes.queries) // ROWS * ROWS
        step = min(max(ROWS, step), STRIP_ROWS)
    while first < sizes.queries:
        last = min(first + step, sizes.queries)
        keys = slice(0, sizes.keys) if spans.residual is None else _hull(hulls, sizes, slice(first, last))
        keep = None if spans.residual is None else _strip(spans, sizes, slice(first, last), keys)
        if found is None:
            shapes = known if keep is None else [*known, keep.shape]
            batch, heads = (max(shape[dim] for shape in shapes) for dim in (0, 1))
            found = kernels.Blocks(batch, heads, sizes.queries, sizes.keys)
        found.add(*edges, keep, keys.start, keys.stop, first, last)
        first = last
    return found


def _hull(hulls: tuple[np.ndarray, np.ndarray], sizes: Sizes, queries: slice) -> slice:
    """Return the keys of whole panels that hold all allowed keys of some queries: at least one panel."""
    start, stop = (edge[:, :, queries if edge.shape[2] > 1 else EVERY].clip(0, sizes.keys) for edge in hulls)
    some = stop > start
    low = np.where(some, start, sizes.keys).min().item() // PANEL * PANEL
    high = -(-np.where(some, stop, 0).max().item() // PANEL) * PANEL
    return slice(min(low, max(high - PANEL, 0)), min(max(high, PANEL), sizes.keys))


def _strip(spans: Spans, sizes: Sizes, queries: slice, keys: slice) -> Tensor:
    """Compute a mask's residual for some queries and keys, and check its sizes, on which the kernels rely."""
    sides = (slice(0, sizes.batch), slice(0, sizes.heads), queries, keys)
    keep = spans.rest(*sides)
    asked = (sizes.batch, sizes.heads, queries.stop - queries.start, keys.stop - keys.start)
    if not broadcasts(keep.shape, asked) or not is_plain(keep):
        raise ShapeError(f"the residual of a mask's spans gave {shown(keep)}; expected to broadcast to {asked}.")
    return keep
