"""A layer with its maps from afar: the thumbnail, and the pyramid of a long head."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from clearhead.report.codes import map_codes
from clearhead.report.layer import Array, Layer, Pyramid, of_head
from clearhead.report.seen_keys import ROWS, masked_heads, seen_keys
from clearhead.report.statistics import THUMBNAIL, cells_of


def thumbnail_of(layer: Layer, peaks: Array) -> Layer:
    """With the largest w_ij · n_i of each cell, n_i the number of keys that query i may see.

    `peaks`: (H, Lq, columns), the largest weight of each query in each column of cells.
    """
    per_row, per_column = (-(-length // THUMBNAIL) for length in layer.shape)
    counts, _ = seen_keys(layer)
    times = np.maximum.reduceat(peaks * counts[..., None], np.arange(0, layer.shape[0], per_row), 1)
    seen = np.stack([cells_seen(layer, head, per_row, per_column) for head in range(masked_heads(layer))])
    return replace(layer, thumbnail=np.where(seen, times, -1.0).astype(np.float32))


def pyramid_of(layer: Layer, cells: tuple[Array, Array] | None) -> Layer:
    """With the largest weight and the mean of each cell, as codes, where a head has them."""
    if cells is None:
        return layer
    per_row, per_column = cells_of(*layer.shape) or (1, 1)
    masks = [cells_seen(layer, head, per_row, per_column) for head in range(masked_heads(layer))]
    seen = masks * layer.heads if len(masks) == 1 else masks
    largest, mean = (np.stack([map_codes(m, s) for m, s in zip(each, seen, strict=True)]) for each in cells)
    return replace(layer, pyramid=Pyramid(largest, mean, per_row, per_column))


def cells_seen(layer: Layer, head: int, per_row: int, per_column: int) -> Array:
    """Whether some pair of each cell is allowed, bool (rows, columns)."""
    queries, keys = layer.shape
    if layer.bias is None and not layer.holes:
        return _of_spans(layer, head, per_row, per_column)
    band = per_row * max(1, ROWS // per_row)
    columns = np.arange(0, keys, per_column)
    found = []
    for first in range(0, queries, band):
        seen = np.logical_or.reduceat(layer.allowed(head, first, min(first + band, queries)), columns, 1)
        found.append(np.logical_or.reduceat(seen, np.arange(0, len(seen), per_row), 0))
    return np.concatenate(found)


def _of_spans(layer: Layer, head: int, per_row: int, per_column: int) -> Array:
    """The same of spans alone, in O(Lq + cells): how many intervals begin before a cell and have not ended."""
    queries, keys = layer.shape
    start, stop = (np.clip(of_head(edge, head), 0, keys) for edge in (layer.start, layer.stop))
    some = stop > start
    row = np.arange(queries)[some] // per_row
    change = np.zeros((-(-queries // per_row), -(-keys // per_column) + 1), dtype=np.int64)
    np.add.at(change, (row, start[some] // per_column), 1)
    np.add.at(change, (row, -(-stop[some] // per_column)), -1)
    seen: Array = change[:, :-1].cumsum(1) > 0
    return seen
