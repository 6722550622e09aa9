"""The parts that the modules of positions share: tables of numbers that grow on demand, their pictures, and checks."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clearhead.base.arrays import check_float, shown
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.numbers import check_count
from clearhead.base.output.pictures import Axes, Panel, Side, Style, draw
from clearhead.base.shapes import one_or, placed
from clearhead.base.torch_state.contexts import raise_in_jit_trace
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.tensor_kind import is_readable, require_all
from clearhead.masks._read import as_tensor

LEAST, LARGEST = 64, 2**20  # the positions of the first table, and of the largest
CELLS, LONG = 512, 1024  # above LONG positions or entries, a picture has CELLS cells of means


class Tabled(nn.Module):
    """A module that needs a row of numbers for each position.

    The table is no buffer: after `module.half().float()` a buffer would have the digits of half. The table is made
    anew, in float64, for another dtype or device, or other settings of the module, and no state dict, pickle or copy
    has it.
    """

    _table: tuple[tuple[Any, ...] | None, Tensor] | None = None  # the settings that it was made for, and its rows

    @abstractmethod
    def _settings(self) -> tuple[Any, ...] | None:
        """The attributes that a row depends on beside its position; None where it depends on the other positions of a
        call too, so that no table serves."""

    @abstractmethod
    def _rows(self, positions: Tensor) -> Tensor:
        """The rows (N, width) for positions (N,), both float64."""

    def _of(self, x: Tensor, places: int | Tensor, dtype: torch.dtype, who: str) -> Tensor:
        """The rows of the vectors of x (B, ..., L, E), whose `places` are those of `places_of`; they broadcast to
        (B, ..., L, width)."""
        raise_in_jit_trace(type(self).__name__)
        if not isinstance(places, Tensor):
            return self._between(places, places + x.shape[-2], dtype, x.device)
        count = count_of(places, who)
        if count is None:
            rows = self._rows(placed(places, x.device, who).double().flatten()).to(dtype)
        elif self._settings() is not None and count <= LARGEST:
            rows = self._upto(count, dtype, x.device)[placed(places, x.device, who).flatten()]
        else:
            rows = self._apart(places.flatten(), dtype, x.device)
        return spread(rows.reshape(*places.shape, rows.shape[-1]), x)

    def _between(self, start: int, stop: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The rows of the positions from `start` up to `stop`, (stop − start, width)."""
        mode = get_mode()
        if mode.compiled or mode.traced:  # a graph can't keep a table, and fake tensors are no table for other calls
            return self._rows(torch.arange(start, stop, dtype=torch.float64, device=device)).to(dtype)
        if self._settings() is None or stop > LARGEST:
            return self._apart(torch.arange(start, stop, device="cpu"), dtype, device)
        return self._upto(stop, dtype, device)[start:stop]

    def _apart(self, positions: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The rows of positions (N,), without the table, in eager code; not every device has float64."""
        return self._rows(positions.to("cpu").double()).to(device, dtype)

    def _upto(self, stop: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The rows of the positions 0 to `stop` at least, (≥ stop, width), in eager code."""
        settings = self._settings()
        made_for, table = self._table or (None, None)
        fits = table is not None and settings is not None and made_for == settings
        if table is None or not fits or table.shape[0] < stop or table.dtype != dtype or table.device != device:
            length = max(LEAST, 1 << (stop - 1).bit_length())
            # training may use the table next, so it is no tensor of inference mode; not every device has float64
            with torch.inference_mode(False), torch.no_grad():
                table = self._rows(torch.arange(length, dtype=torch.float64, device="cpu")).to(device, dtype)
            self._table = settings, table
        return table

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_table"}


def check_embedded(x: Any, width: int, who: str) -> None:
    """Check vectors (..., L, width) of floating point."""
    if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[-1] != width:
        raise ShapeError(
            f"{who}: x is {shown(x)}; pass a tensor (..., L, {width}): positions, then embed_dim = {width}."
        )
    check_float(x, f"{who}: x")


def places_of(x: Tensor, offset: Any, positions: Any, who: str, named: str = "positions") -> int | Tensor:
    """Where the vectors of x (B, ..., L, E) stand, checked: the position of the first one, from which the others are
    counted; or the position of each, integers (L,) or (B, L), on the device on which they were given, where they are
    read before they go to that of x. `named`: the name of the argument `positions`."""
    if positions is None and not isinstance(offset, Tensor):
        return check_count(offset, 0, f"{who}: offset")
    if positions is not None and (isinstance(offset, Tensor) or offset != 0):
        raise ClearheadError(
            f"{who}: both offset and positions are given. offset is the position of the first vector, positions those "
            "of all: pass one of the two."
        )
    name, length = "offset" if positions is None else named, x.shape[-2]
    given = as_tensor(offset if positions is None else positions, f"{who}: {name}")
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise ClearheadError(f"{who}: {name} has dtype {given.dtype}; expected integers.")
    given = given.long()
    rows = given.shape[0] if given.ndim == 2 else 1
    if positions is None:
        if given.numel() != 1 and (given.ndim != 1 or x.ndim < 3 or given.shape[0] != x.shape[0]):
            raise ShapeError(
                f"{who}: offset has shape {tuple(given.shape)} and x {tuple(x.shape)}; expected (B,), one position for "
                "each sequence of x (B, ..., L, E)."
            )
        given = given.reshape(-1, 1) + torch.arange(length, device=given.device)
    elif given.ndim not in (1, 2) or given.shape[-1] != length or not one_or(rows, x.shape[0] if x.ndim > 2 else 1):
        raise ShapeError(
            f"{who}: {name} has shape {tuple(given.shape)}, for vectors {tuple(x.shape)}; expected ({length},), or (B, "
            f"{length}), where the batch comes first: one position for each vector."
        )
    return given[0] if given.ndim == 2 and given.shape[0] == 1 else given


def every_position(x: Tensor, offset: Any, positions: Any, who: str) -> Tensor:
    """The position of each vector of x (B, ..., L, E), (L,) or (B, L), on its device."""
    places = places_of(x, offset, positions, who)
    if isinstance(places, Tensor):
        return placed(places, x.device, who)
    return torch.arange(places, places + x.shape[-2], device=x.device)


def count_of(places: Tensor, who: str, most: float = math.inf) -> int | None:
    """How many positions there are at least, of which these are some: 1 + the largest, or 0. None where their values
    can't be read: there they are asserted to be below `most`. Raises for positions below 0."""
    if not is_readable(places):
        wrong = lambda: ClearheadError(f"{who}: a position is below 0, or beyond the last.")  # noqa: E731
        require_all((places >= 0) & (places < most), wrong, f"{who}: a position is below 0, or beyond the last")
        return None
    least, largest = torch.stack(places.aminmax()).tolist() if places.numel() else (0, -1)
    if least < 0:
        raise ClearheadError(f"{who}: a vector stands at {least}; a position is 0 or more.")
    return int(largest) + 1


def spread(rows: Tensor, x: Tensor) -> Tensor:
    """Rows (L, width), or (B, L, width), as they broadcast to x (B, ..., L, width)."""
    return rows if rows.ndim == 2 else rows.reshape(rows.shape[0], *(1,) * (x.ndim - 3), *rows.shape[1:])


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
