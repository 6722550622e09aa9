"""Tables of numbers that depend on the position alone, kept and made longer on demand."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.tracing import compiling

LEAST = 64  # positions that the first table has


class Tabled(nn.Module):
    """A module that needs a row of numbers for each position.

    The table is no buffer: `module.half().float()` would leave one with half's digits. It is made anew for another
    dtype or device, always from float64, and is in no state dict, pickle or copy.
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
            # not a tensor of inference mode: training may use the table next. float64 is not on every device
            with torch.inference_mode(False), torch.no_grad():
                table = self._rows(torch.arange(length, dtype=torch.float64, device="cpu")).to(device, dtype)
            self._table = table
        return table

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_table"}
