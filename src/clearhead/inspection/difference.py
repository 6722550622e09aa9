"""The lazy matrix of the difference of two matrices of weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from clearhead.base.errors import human_bytes
from clearhead.base.shapes import Sizes
from clearhead.inspection.by_blocks import blocks
from clearhead.inspection.index import Heads
from clearhead.inspection.matrix import LazyMatrix
from clearhead.inspection.weights import Weights


class Aligned:
    """Some weights at the positions that are compared, as rows and columns: all, or `places`, in ascending order.

    A part is read from the first to the last wanted row, and the rows between that are not wanted are left out.
    """

    def __init__(self, weights: Weights, places: Tensor | None) -> None:
        self.weights, self.places = weights, places
        batch, heads, queries, keys = weights.shape
        count = None if places is None else len(places)
        self.sizes = Sizes(batch, heads, *((queries, keys) if count is None else (count, count)), weights.device)

    def of(self, heads: Heads) -> Aligned:
        """Some heads, as (B, H, Lq, Lk)."""
        whole = self.weights._of_heads(heads._replace(leading=None))
        return Aligned(whole, self.places)

    def part(self, batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
        """A part of (B, H, Lq, Lk)."""
        if self.places is None:
            return cast(Tensor, self.weights[batch, heads, queries, keys])
        rows, columns = self.places[queries], self.places[keys]
        if not len(rows):
            return cast(Tensor, self.weights[batch, heads, 0:0, : len(columns)])
        first = int(rows[0])
        tile: Tensor = self.weights[batch, heads, first : int(rows[-1]) + 1]
        device = tile.device
        return tile[:, :, (rows - first).to(device)][..., columns.to(device)]


class WeightDifference(LazyMatrix[Tensor]):
    """How much more weight one recording gives each pair than another: B − A, computed where it is looked at.

    >>> import torch, clearhead as ch
    >>> block, x, y = ch.nn.DotProductAttention(), torch.eye(4)[:3].expand(1, 2, 3, 4) * 2, torch.zeros(1, 2, 3, 4)
    >>> with ch.watch(block) as before:
    ...     output = block(y, y, y, mask=ch.Causal())
    >>> with ch.watch(block) as after:
    ...     output = block(x, x, x, mask=ch.Causal())
    >>> difference = before.compare(after)[0].weights
    >>> difference.shape, difference[0, 1, 1]
    (torch.Size([1, 2, 3, 3]), tensor([-0.3808,  0.3808,  0.0000]))

    `difference[index]`, a basic index, gives that part; `blocks(sequence, head)` goes through a head's rows a block at
    a time. Both are the models' own weights: with sinks, rows are not renormalised. Raises a `ClearheadError` for a
    part above 256 MiB. Memory is that of the part. Sums, extremes and operators are those of `Weights`.
    """

    _instead = "Index the part you need (d[..., -1, :]), go through blocks(sequence, head)"
    _limits_parts = True

    def __init__(self, before: Aligned, after: Aligned) -> None:
        self._before, self._after = before, after
        self._sizes = before.sizes

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self._before.weights.dtype, self._after.weights.dtype)

    def _in_graph(self) -> bool:
        return self._before.weights._in_graph() or self._after.weights._in_graph()

    def _of_heads(self, heads: Heads) -> WeightDifference:
        found = WeightDifference(self._before.of(heads), self._after.of(heads))
        found._sizes = heads.shown(found._sizes)
        return found

    def _tile(self, batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
        before, after = (one.part(batch, heads, queries, keys) for one in (self._before, self._after))
        return after.to(before.device) - before

    def blocks(self, sequence: int, head: int) -> Iterator[tuple[slice, Tensor]]:
        """One head of one sequence, some rows at a time: each a slice of the queries, and (rows, Lk) numbers."""
        for rows, _ in blocks(self.shape[2:]):
            yield rows, cast(Tensor, self[sequence, head, rows])

    def _head(self) -> str:
        size = human_bytes(self.numel() * self.dtype.itemsize)
        return f"WeightDifference({tuple(self.shape)}, {self.dtype}, {size} if it were dense)"
