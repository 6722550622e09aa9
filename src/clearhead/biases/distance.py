"""A bias given as one number a distance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.base.errors import ShapeError
from clearhead.base.positions import positions
from clearhead.base.shapes import Sides, Sizes, broadcasts, part, placed
from clearhead.base.steps import PAIRS, Step, made
from clearhead.biases.base import Added, Bias, keep, looked_up, wide


class DistanceBias(Bias):
    """Any numbers, one for each distance from a query to a key.

    >>> import torch
    >>> from clearhead.biases import DistanceBias
    >>> DistanceBias(torch.tensor([-2., -1., 0., 9., 9.]))(torch.zeros(3, 4), torch.zeros(3, 4))
    tensor([[ 0.,  9.,  9.],
            [-1.,  0.,  9.],
            [-2., -1.,  0.]])

    Formula: b_ij = table[..., j − i + Lq − 1]: the first entry is for the last query and the first key.
    `table`: float, (Lq + Lk − 1,), (H, Lq + Lk − 1) or (B, H, Lq + Lk − 1), sizes of 1 broadcast. It is kept
    as it is, and the state dict has it.
    Raises a `ClearheadError` for other dtypes and shapes. Cost: O(Lq + Lk) numbers a head.
    """

    table: Tensor

    def __init__(self, table: Any) -> None:
        super().__init__()
        expected = "floating-point numbers (Lq + Lk − 1,), (H, Lq + Lk − 1) or (B, H, Lq + Lk − 1)."
        keep(self, "table", table, expected, dimensions=(1, 2, 3))

    @classmethod
    def example(cls, sizes: Sizes) -> Bias:
        return cls(torch.linspace(-2.0, 1.0, max(sizes.queries + sizes.keys - 1, 0)).sin().requires_grad_())

    def steps(self, sizes: Sizes, at: Sides, name: str = "bias") -> list[Step]:
        rows, columns = positions(sizes._replace(align=0), at, name, "DistanceBias")  # the table counts from 0 for both
        after = columns.value - rows.value
        first, last = int(after.min()), int(after.max())
        rows = rows.but(within=(int(rows.value.min()), int(rows.value.max())))  # each place is in the table
        along = wide(part(self._table(sizes), *at[:2]))[:, :, None, sizes.queries - 1 + first : sizes.queries + last]
        given = "The numbers that were given, one a distance, for the distances here."
        table = Step(f"{name}_table", given, along, (*PAIRS[:2], "1", "distance"))
        why = (
            f"How far the key is after the query; where it is before it, below 0. {-first} more is its place in the "
            "table, which begins with the key that is farthest before its query."
        )
        places = made(f"{name}_places", why, columns - rows + -first, PAIRS)
        return [rows, columns, places, table, looked_up(name, table, places)]

    def lower(self, sizes: Sizes) -> Added:
        return Added(relative=self._table(sizes))

    def _table(self, sizes: Sizes) -> Tensor:
        """(B or 1, H or 1, Lq + Lk − 1)."""
        table = self.table.reshape((1,) * (3 - self.table.ndim) + tuple(self.table.shape))
        expected = (sizes.batch, sizes.heads, max(sizes.queries + sizes.keys - 1, 0))
        if table.shape[2] != expected[2] or not broadcasts(table.shape, expected):
            raise ShapeError(
                f"DistanceBias: table has shape {tuple(self.table.shape)}; expected something that broadcasts to "
                f"(B, H, Lq + Lk − 1) = {expected}."
            )
        return placed(table, sizes.device, "DistanceBias")

    def extra_repr(self) -> str:
        return f"<{'×'.join(map(str, self.table.shape))}>"
