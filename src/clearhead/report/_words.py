"""The positions of a call that the page shows: all positions but padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.errors import ClearheadError
from clearhead.engines.tiled.look import Look
from clearhead.inspection.reductions.base import Reduction
from clearhead.problem.problem import Problem
from clearhead.problem.words import ALL_WORDS


class Shown:
    """The positions that one side of a call shows. `words`: bool (L,), or None for all of `length`."""

    def __init__(self, words: Tensor | None, length: int, name: str) -> None:
        self.length = length
        self.places = np.arange(length) if words is None else np.flatnonzero(words.cpu().numpy())
        if not len(self.places):
            raise ClearheadError(f"{name} was given nothing but padding for this sequence; pass another sequence=.")

    @property
    def all(self) -> bool:
        return len(self.places) == self.length

    @property
    def even(self) -> bool:
        """Whether the shown positions are consecutive."""
        return int(self.places[-1] - self.places[0]) == len(self.places) - 1

    def of(self, array: Any, axis: int) -> Any:
        """The array without the positions of `axis` that are not shown."""
        return array if self.all else np.ascontiguousarray(np.take(array, self.places, axis))

    def before(self) -> Any:
        """The number of shown positions before each position, (length + 1,)."""
        shown = np.zeros(self.length, dtype=np.int64)
        shown[self.places] = 1
        return np.concatenate([[0], np.cumsum(shown)])

    def labels(self, tokens: Sequence[str]) -> list[str]:
        """The tokens of the shown positions, from tokens for these or for all; without tokens, their numbers."""
        if len(tokens) == self.length:
            return [tokens[int(i)] for i in self.places]
        return list(tokens) if len(tokens) == len(self.places) else [str(i) for i in self.places]


def list_shown(call: Any, sequence: int) -> tuple[Shown, Shown]:
    """The shown queries and keys of one sequence of a recorded call."""
    queries, keys = (
        Shown(None if words is None else words[sequence], length, call.name)
        for words, length in zip(call.padding or ALL_WORDS, call.shape[2:], strict=True)
    )
    return queries, keys


class Cells(Reduction):
    """The largest weights of a call of one sequence in a map of at most so many cells, over shown positions.

    `size`: the most rows and columns.
    """

    def __init__(self, queries: Shown, keys: Shown, size: tuple[int, int]) -> None:
        self.cells = [_cells(queries, size[0]), _cells(keys, size[1])]

    def begin(self, problem: Problem) -> Tensor:
        # the last row and column have hidden positions, and are dropped at the end
        rows, columns = (int(cells.max()) + 1 for cells in self.cells)
        dtype = accumulated(problem.query.dtype)
        return torch.zeros(1, problem.sizes.heads, rows, columns, dtype=dtype, device=problem.sizes.device)

    def look(self, buffers: Tensor, look: Look) -> None:
        _, heads, _ = look.at
        if not look.weights.shape[-1]:
            return
        weights = look.weights[0]
        rows, columns = (t.to(weights.device)[s] for t, s in zip(self.cells, look.region.sides[2:], strict=True))
        count, wide = len(weights), buffers.shape[3]
        part = weights.new_zeros(count, len(rows), wide)
        part.scatter_reduce_(2, columns.expand_as(weights), weights, "amax")
        target = buffers[0, heads]
        target.scatter_reduce_(1, rows.view(1, -1, 1).expand(count, -1, wide), part, "amax")

    def end(self, buffers: Tensor, problem: Problem) -> Tensor:
        return buffers[:, :, :-1, :-1]


def _cells(side: Shown, size: int) -> Tensor:
    """The cell of each position. Positions that are not shown have a further cell after the last one."""
    step = -(-len(side.places) // size)
    cells = torch.full((side.length + 1,), -(-len(side.places) // step), dtype=torch.int64, device="cpu")
    cells[torch.from_numpy(side.places)] = torch.arange(len(side.places), device="cpu") // step
    return cells
