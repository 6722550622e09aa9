"""The parts of the score matrix: regions, and the walk over them by the spans."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from clearhead.base.shapes import Sizes
from clearhead.base.tracing import compiling
from clearhead.problem.problem import Problem

ROWS = 256  # the most queries to a block where the mask depends on the query: more would skip less


EVERY = slice(None)


BUDGET = 2**21  # elements of a block's scores, or of what is made on the way to them


TRACED = 2**24  # the same in compiled code, where more blocks than one hold for one size alone


LOOK = 2**20  # the same for an inspection, which makes a few passes over each block: it should stay in the cache


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the matrix (batch, heads, queries, keys); `masked`: some pair in it is not allowed."""

    batch: slice
    heads: slice
    queries: slice
    keys: slice
    masked: bool

    @classmethod
    def whole(cls, sizes: Sizes, masked: bool) -> Block:
        """All of the matrix."""
        batch, heads, queries, keys = (slice(0, size) for size in sizes.shape)
        return cls(batch, heads, queries, keys, masked)

    @property
    def sides(self) -> tuple[slice, slice, slice, slice]:
        return self.batch, self.heads, self.queries, self.keys

    @property
    def area(self) -> int:
        return math.prod(s.stop - s.start for s in self.sides)


def batch_groups(start: np.ndarray, stop: np.ndarray, batch: int) -> list[slice]:
    """Consecutive sequences with the same spans, which can be computed together."""
    if start.shape[0] == 1:
        return [slice(0, batch)]
    differ = (start[1:] != start[:-1]).any((1, 2)) | (stop[1:] != stop[:-1]).any((1, 2))
    edges = [0, *(np.flatnonzero(differ) + 1).tolist(), batch]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def blocks(problem: Problem, budget: int) -> Iterator[Block]:
    """Go through the matrix in blocks of at most about `budget` elements of work memory.

    The order is by sequence, then by head, then by query, the same cuts for all queries: see `assemble`.
    """
    sizes, groups = problem.sizes, problem.groups
    if not sizes.batch or not sizes.heads or not sizes.queries:
        return
    if compiling() and math.prod(sizes.shape) * width(problem) <= TRACED:
        # a slice with an end would tie the code to this size
        yield Block(EVERY, EVERY, EVERY, EVERY, masked=problem.spans is not None)
        return
    for batch, bands in _bands(problem):
        row = max(1, max(keys.stop - keys.start for _, keys, _ in bands) * width(problem))
        rows = max(1, min(max(q.stop - q.start for q, _, _ in bands), budget // row))
        head_step = max(groups, min(sizes.heads, budget // (row * rows)) // groups * groups)
        batch_step = max(1, budget // (row * rows * head_step))
        for b in range(batch.start, batch.stop, batch_step):
            for h in range(0, sizes.heads, head_step):
                some = slice(b, min(b + batch_step, batch.stop)), slice(h, min(h + head_step, sizes.heads))
                for queries, keys, masked in bands:
                    for q in range(queries.start, queries.stop, rows):
                        yield Block(*some, slice(q, min(q + rows, queries.stop)), keys, masked)


def _bands(problem: Problem) -> Iterator[tuple[slice, list[tuple[slice, slice, bool]]]]:
    """For each group of sequences with the same spans: bands of queries, the hull of their keys, if it has holes."""
    sizes, spans = problem.sizes, problem.spans
    if spans is None or problem.edges is None:  # no mask, or one whose edges are hidden
        yield slice(0, sizes.batch), [(slice(0, sizes.queries), slice(0, sizes.keys), spans is not None)]
        return
    start, stop = problem.edges
    for batch in batch_groups(start, stop, sizes.batch):
        first, last = (edge[0 if start.shape[0] == 1 else batch.start] for edge in (start, stop))  # (H or 1, Lq or 1)
        varies = first.shape[-1] > 1
        step = ROWS if varies else max(sizes.queries, 1)
        bands = []
        for row in range(0, sizes.queries, step):
            queries = slice(row, min(row + step, sizes.queries))
            lows, highs = (edge[:, queries if varies else EVERY] for edge in (first, last))
            some = highs > lows
            low, high = (int(lows[some].min()), int(highs.max())) if some.any() else (0, 0)
            masked = spans.residual is not None or bool((lows != low).any() or (highs != high).any())
            bands.append((queries, slice(low, high), masked))
        if bands:
            yield batch, bands


def assemble(parts: Sequence[Tensor], every: Sequence[Block]) -> Tensor:
    """Join the blocks' outputs (b, h, q, ...), in the order of `blocks`, to one (B, H, Lq, ...)."""
    batches: dict[int, dict[int, list[Tensor]]] = {}
    for block, output in zip(every, parts, strict=True):
        batches.setdefault(block.batch.start, {}).setdefault(block.heads.start, []).append(output)
    return join([join([join(rows, 2) for rows in heads.values()], 1) for heads in batches.values()], 0)


def join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def width(problem: Problem) -> int:
    """Numbers made on the way to one score: a matrix product makes none, other scores one a dimension."""
    lowered = problem.lowered
    if lowered is not None:
        return 1 if lowered.phi == "mul" else lowered.key.shape[-1]
    return max(problem.query.shape[-1], problem.key.shape[-1])


def head_part(tensor: Tensor, groups: int, block: Block) -> Tensor:
    """The key heads (of key, value or poison) that a block's query heads use."""
    heads = range(*block.heads.indices(tensor.shape[1] * groups))
    first, last = (heads[0] // groups, heads[-1] // groups) if len(heads) else (0, -1)
    whole = heads.step == 1 and len(heads) == (last + 1 - first) * groups
    if whole or first == last:
        return tensor[block.batch, first : last + 1]
    return tensor[block.batch, [h // groups for h in heads]]
