"""The parts that the modules of positions share: tables of numbers that grow on demand, their pictures, and checks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from clearhead.base.arrays import check_float
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.numbers import check_count
from clearhead.base.pictures import Panel, Side, Style, draw
from clearhead.base.tracing import compiling

if TYPE_CHECKING:
    from clearhead.base.pictures import Axes

LEAST = 64  # the positions of the first table
CELLS, LONG = 512, 1024  # above LONG positions or entries, a picture has CELLS cells of means


class Tabled(nn.Module):
    """A module that needs a row of numbers for each position.

    The table is no buffer: after `module.half().float()` a buffer would have the digits of half. The table is made
    anew, in float64, for another dtype or device, and no state dict, pickle or copy has it.
    """

    _table: Tensor | None = None

    @abstractmethod
    def _rows(self, positions: Tensor) -> Tensor:
        """The rows (N, width) for positions (N,), both float64."""

    def _between(self, start: int, stop: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The rows of the positions from `start` up to `stop`, (stop − start, width)."""
        if compiling():  # a graph can't keep a table
            return self._rows(torch.arange(start, stop, dtype=torch.float64, device=device)).to(dtype)
        return self._upto(stop, dtype, device)[start:stop]

    def _upto(self, stop: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The rows of the positions 0 to `stop` at least, (≥ stop, width), in eager code."""
        table = self._table
        if table is None or table.shape[0] < stop or table.dtype != dtype or table.device != device:
            length = max(LEAST, 1 << (stop - 1).bit_length())
            # training may use the table next, so it is no tensor of inference mode; not every device has float64
            with torch.inference_mode(False), torch.no_grad():
                table = self._rows(torch.arange(length, dtype=torch.float64, device="cpu")).to(device, dtype)
            self._table = table
        return table

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_table"}


def check_embedded(x: Any, width: int, who: str) -> None:
    """Check vectors (..., L, width) of floating point."""
    if not isinstance(x, Tensor):
        raise ClearheadError(f"{who}: x is a {type(x).__name__}; pass a tensor (..., L, {width}).")
    check_float(x, f"{who}: x")
    if x.ndim < 2 or x.shape[-1] != width:
        raise ShapeError(
            f"{who}: x has shape {tuple(x.shape)}; expected (..., L, {width}): positions, then embed_dim = {width}."
        )


def check_offset(offset: Any, who: str) -> int:
    """The position of the first vector, checked."""
    if isinstance(offset, Tensor):
        raise ClearheadError(
            f"{who}: offset is a tensor {tuple(offset.shape)}; expected a whole number: int(offset). "
            "RotaryEmbedding takes one position for each sequence."
        )
    return check_count(offset, 0, f"{who}: offset", most=2**24)


def plot(tables: Mapping[str, Tensor], style: Style) -> Axes | np.ndarray:
    """Tables (L, E) of numbers for each position, side by side."""
    panels = []
    with torch.no_grad():
        for title, table in tables.items():
            shape = table.shape
            size = tuple(CELLS if side > LONG else side for side in shape)
            if size != tuple(shape):
                table = torch.nn.functional.adaptive_avg_pool2d(table[None].float(), (size[0], size[1]))[0]
            panels.append(Panel(table.float().cpu().numpy(), None, title))
    rows, columns = Side("position", shape[0]), Side("entry", shape[1])
    return draw(panels, rows, columns, style, "mean of the cell" if max(shape) > LONG else "value")


def check_length(length: int, most: float = 2**20) -> int:
    return check_count(length, 1, "length", most=most)
