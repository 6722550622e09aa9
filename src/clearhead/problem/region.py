"""A part of the score matrix, and the parts of a mask and a bias for it."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from torch import Tensor

from clearhead.base.kept import Memo
from clearhead.base.shapes import Sides, Sizes, part
from clearhead.biases.base import Added
from clearhead.masks.base import Residual, map_edges
from clearhead.problem.visible import Later, Visible

EVERY = slice(None)


class Region(NamedTuple):
    """A part of the matrix (batch, heads, queries, keys); `masked`: whether it may hold masked pairs."""

    batch: slice = EVERY
    heads: slice = EVERY
    queries: slice = EVERY
    keys: slice = EVERY
    masked: bool = True

    @property
    def sides(self) -> Sides:
        return self[:4]

    @property
    def area(self) -> int:
        return math.prod(s.stop - s.start for s in self.sides)


def visible_part(visible: Visible, region: Region, sizes: Sizes) -> Visible:
    """Return the part of a mask that belongs to a region."""
    spans = visible.spans
    edges = visible.edges if visible.read else None
    batch, heads, queries, keys = region.sides
    if edges is not None:
        edges = host_part(edges[0], region), host_part(edges[1], region)
    places = range(sizes.keys)[keys]
    if places != range(sizes.keys) and edges is not None:
        low, high = ((-((places.start - edge) // places.step)).clip(0, len(places)) for edge in edges)
        edges = np.where(high > low, low, 0), np.where(high > low, high, 0)
    residual = None if spans.residual is None else _part_of(spans.residual, region, sizes)
    spans = map_edges(spans, lambda edge: _moved(part(edge, batch, heads, queries), places, sizes))
    known = Later(len(places), visible.known.who) if edges is None and isinstance(visible.known, Later) else edges
    return Visible(spans._replace(residual=residual), known, visible.unseen, Memo())


def _moved(edge: Tensor, places: range, sizes: Sizes) -> Tensor:
    """Return an edge as an index among `places`: the first place at or after it."""
    if places == range(sizes.keys):
        return edge
    return (-((places.start - edge) // places.step)).clamp(0, len(places))


def host_part(edge: np.ndarray, region: Region) -> np.ndarray:
    """Return a region's part of an array (B or 1, H or 1, Lq or 1, …) on the host."""
    found: np.ndarray = edge[tuple(EVERY if n == 1 else s for n, s in zip(edge.shape[:3], region.sides, strict=False))]
    return found


def _part_of(function: Residual, region: Region, sizes: Sizes) -> Residual:
    """Convert a function of four slices of the whole matrix to one of four slices of the region."""
    places = [range(size)[side] for side, size in zip(region.sides, sizes.shape, strict=True)]

    def rest(*sides: slice) -> Tensor:
        inside = (all_of[side] for all_of, side in zip(places, sides, strict=True))
        return function(*(slice(r.start, max(r.stop, r.start), r.step) for r in inside))

    return rest


def bias_part(bias: Added, region: Region, sizes: Sizes) -> Added:
    """Return the part of a bias that belongs to a region."""
    batch, heads, queries, keys = region.sides
    rows, columns = range(sizes.queries)[queries], range(sizes.keys)[keys]
    function = None if bias.function is None else _part_of(bias.function, region, sizes)
    dense = None if bias.dense is None else part(bias.dense, batch, heads, queries, keys)
    if bias.relative is None:
        return Added(dense, None, function, bias.reads)
    if rows.step != 1 or columns.step != 1:  # the steps break the form of one number for each distance
        numbers = bias._replace(function=None)
        return Added(numbers.tile(batch, heads, queries, keys, sizes), None, function, bias.reads)
    first = sizes.queries - rows.stop + columns.start
    along = part(bias.relative, batch, heads)[..., first : first + max(len(rows) + len(columns) - 1, 0)]
    return Added(dense, along, function, bias.reads)
