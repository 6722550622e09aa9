"""Pictures of positional encodings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from clearhead.base.numbers import check_count
from clearhead.base.pictures import Panel, Side, Style, draw

CELLS, LONG = 512, 1024  # beyond so many positions, or entries, they are averaged to so many cells


def plot(tables: Mapping[str, Tensor], style: Style) -> Any:
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
