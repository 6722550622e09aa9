"""Spans split into pieces that a fused kernel computes without a mask, or with one small mask for many tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from clearhead.problem.problem import Problem
from clearhead.problem.regions import batch_groups

TILE = 256  # the most queries of a tile of a band or of a masked piece
MASK_CELLS = 2**24  # the most cells of the mask tile of one masked piece, over batch and heads

Kind = Literal["full", "causal", "band", "masked"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some queries, their keys, and the kind of their mask.

    `full`: every query attends to all the keys. `causal`: a square, in which each query attends to one key more than
    the query before. `band`: each query attends to `width` keys, which begin one key later than for the query before;
    it is split into tiles of `tile` queries. `masked`: any other mask, which is computed for this piece.
    """

    queries: slice
    keys: slice
    kind: Kind
    width: int = 0
    tile: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.queries.stop - self.queries.start), int(self.keys.stop - self.keys.start)

    @property
    def area(self) -> int:
        """The number of computed pairs; half of the square for a causal piece."""
        rows, columns = self.shape
        if self.kind == "causal":
            return rows * (rows + 1) // 2
        return rows * (self.tile + self.width - 1 if self.kind == "band" else columns)

    def mask_cells(self, batch_heads: int) -> int:
        if self.kind == "band":
            return self.tile * (self.tile + self.width - 1)
        rows, columns = self.shape
        return rows * columns * batch_heads if self.kind == "masked" else 0


def pieces(problem: Problem) -> Iterator[tuple[slice, list[Piece]]]:
    """Yield each group of sequences with equal spans, and its pieces in the order of the queries."""
    sizes, spans = problem.sizes, problem.spans
    if not sizes.batch or not sizes.heads or not sizes.queries:
        return
    start, stop = problem.edges or (np.zeros((1, 1, 1), np.int64), np.full((1, 1, 1), sizes.keys))
    irregular = problem.bias is not None or (spans is not None and not spans.plain)
    one_head = start.shape[1] == 1 or bool((start == start[:, :1]).all() and (stop == stop[:, :1]).all())
    for batch in batch_groups(start, stop, sizes.batch):
        at = 0 if start.shape[0] == 1 else batch.start
        first, last = start[at], stop[at]  # (H or 1, Lq or 1)
        found = None
        if one_head and not irregular:
            found = _regular(first[0], last[0], sizes.queries)
        if found is None:
            some = last > first
            low = np.where(some, first, sizes.keys).min(0)  # the hull over heads
            found = list(_masked(low, last.max(0), sizes.queries, (batch.stop - batch.start) * sizes.heads))
        yield batch, found


def _regular(start: np.ndarray, stop: np.ndarray, queries: int) -> list[Piece] | None:
    """Return runs of queries whose spans move in one way; None if there would be too many runs."""
    if start.shape[0] == 1:
        return [Piece(slice(0, queries), slice(int(start[0]), int(stop[0])), "full")]
    starts, stops = start[1:] - start[:-1], stop[1:] - stop[:-1]
    # 0: neither edge moves, 1: the stop moves by one, 2: the start moves by one, 3: both move; -1: any other change
    moves = np.where((starts | stops) & ~1, -1, 2 * starts + stops)
    change = np.flatnonzero(moves[1:] != moves[:-1]) + 1
    if len(change) > max(16, queries // 64):
        return None
    found: list[Piece] = []
    row = 0
    while row < queries:
        if row == queries - 1 or moves[row] == -1:
            end = row
        else:
            after = change[np.searchsorted(change, row, side="right") :]
            end = int(after[0]) if len(after) else queries - 1
        found += _run(slice(row, end + 1), start[row : end + 1], stop[row : end + 1])
        row = end + 1
    return found


def _run(queries: slice, start: np.ndarray, stop: np.ndarray) -> Iterator[Piece]:
    """Yield the pieces of one run."""
    low, high = int(start[0]), int(stop[-1])
    width = int(stop[0]) - low
    if start[-1] == low and stop[0] == high:
        yield Piece(queries, slice(low, high), "full")
    elif start[-1] == low and width == 1:
        yield Piece(queries, slice(low, high), "causal")
    elif start[-1] > low and stop[-1] > stop[0]:  # both move
        tile = min(TILE, max(32, width))
        whole = (queries.stop - queries.start) // tile * tile
        if whole:
            rows = slice(queries.start, queries.start + whole)
            yield Piece(rows, slice(low, low + whole + width - 1), "band", width, tile)
        if queries.start + whole < queries.stop:
            yield Piece(slice(queries.start + whole, queries.stop), slice(low + whole, high), "masked")
    else:
        for piece in _masked(start, stop, len(start), 1):
            yield Piece(
                slice(piece.queries.start + queries.start, piece.queries.stop + queries.start), piece.keys, "masked"
            )


def _masked(low: np.ndarray, high: np.ndarray, queries: int, batch_heads: int) -> Iterator[Piece]:
    """Yield tiles of queries with the hull of their keys; each tile needs a mask."""
    fixed = low.shape[0] == 1
    widest = int(high.max()) - int(low.min())
    step = max(1, MASK_CELLS // max(1, widest * batch_heads))
    step = min(step, queries) if fixed else min(step, queries, TILE)
    for row in range(0, queries, max(step, 1)):
        rows = slice(row, min(row + step, queries))
        lows, highs = (edge if fixed else edge[rows] for edge in (low, high))
        bottom, top = int(lows.min()), int(highs.max())
        yield Piece(rows, slice(bottom, max(bottom, top)), "masked")
