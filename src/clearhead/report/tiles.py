"""A matrix of pairs in square tiles: tiles of zeros are not kept, and equal tiles are kept once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
SIDE = 128


class Tiles(NamedTuple):
    """A matrix (Lq, Lk) in tiles.

    `places`, (rows, columns) int32: for each tile the place of its numbers in `tiles`, (n, side, side), bool or
    float32; −1 for a tile of zeros. The last tiles of a row and of a column are filled up with zeros.
    """

    places: Array
    tiles: Array

    @property
    def side(self) -> int:
        return int(self.tiles.shape[-1])

    def rows(self, first: int, last: int, keys: int) -> Array:
        """The rows of the matrix from `first` up to `last`, (last − first, keys)."""
        side = self.side
        bands = self.places[first // side : -(-last // side)]
        found = np.where((bands < 0)[..., None, None], np.zeros_like(self.tiles[:1]), self.tiles[bands])
        matrix = found.swapaxes(1, 2).reshape(len(bands) * side, -1)
        start = first - first // side * side
        return matrix[start : start + last - first, :keys]


def tiled(band: Callable[[int, int], Array], queries: int, keys: int) -> Tiles | None:
    """The tiles of a matrix (queries, keys); None where all are zeros. `band(first, last)` gives rows of the matrix."""
    side = min(SIDE, max(16, 1 << (max(queries, keys) - 1).bit_length()))
    across = -(-keys // side)
    places, kept, numbers = list[Array](), list[Array](), dict[bytes, int]()
    for first in range(0, queries, side):
        rows = band(first, min(first + side, queries))
        padded = np.zeros((side, across * side), dtype=rows.dtype)
        padded[: len(rows), :keys] = rows
        tiles = padded.reshape(side, across, side).swapaxes(0, 1)
        here = np.full(across, -1, dtype=np.int32)
        for column in np.flatnonzero((tiles != 0).any((1, 2))):
            tile = np.ascontiguousarray(tiles[column])
            number = numbers.setdefault(hashlib.sha256(tile.data).digest(), len(kept))
            if number == len(kept):
                kept.append(tile)
            here[column] = number
        places.append(here)
    return Tiles(np.stack(places), np.stack(kept)) if kept else None
