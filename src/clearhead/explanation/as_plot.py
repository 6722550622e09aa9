"""A step of an explanation as pictures: one for each sequence and head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from clearhead.base.errors import ClearheadError, require
from clearhead.base.output.pictures import Panel, to_label, to_plain_text, write_numbers
from clearhead.base.symbolic.formulas import number
from clearhead.base.symbolic.steps import Step
from clearhead.explanation.document import tables
from clearhead.explanation.shown import Shown

if TYPE_CHECKING:
    from clearhead.base.output.pictures import Axes


def plot(step: Step, shown: Shown, ax: Axes | None) -> Axes | np.ndarray:
    """Draw a step. Returns the axes, or an array of axes for several pictures. `ax`: the axes for one picture."""
    pyplot = require("matplotlib.pyplot", "plot", "plot()")
    every = tables(step, shown)
    if ax is None:
        _, axes = pyplot.subplots(1, len(every), squeeze=False, figsize=(4.5 * len(every), 4), layout="constrained")
        axes = axes[0]
    elif len(every) > 1:
        raise ClearheadError(
            f"{step.name} has {len(every)} pictures, and one axes is given: choose one with explain(..., at=...), or "
            "pass no ax."
        )
    else:
        axes = np.array([ax])
    finite = step.value.detach().double()
    finite = finite[finite.isfinite()].abs()
    largest = float(finite.max()) if len(finite) else 1.0
    signed = bool((step.value < 0).any()) and step.value.is_floating_point()
    for axis, table in zip(axes, every, strict=True):
        cells = np.array(table.cells, dtype=float)
        cells[~np.isfinite(cells)] = np.nan  # -∞ is left white
        low, colours = (-largest, "RdBu_r") if signed else (0.0, "GnBu")
        drawn = axis.imshow(cells, cmap=colours, vmin=low, vmax=largest or 1.0, aspect="auto")
        for side, names in ((axis.xaxis, table.columns), (axis.yaxis, table.rows)):
            side.set_ticks(range(len(names)), list(map(to_label, names)))
        axis.tick_params(axis="x", rotation=90)
        axis.set_title(to_plain_text(", ".join(filter(None, [step.name, table.caption]))))
        write_numbers(axis, Panel(cells), drawn, number)
    axes[0].figure.colorbar(drawn, ax=list(axes), label=step.name.replace("_", " "))
    drawn_on: Axes | np.ndarray = axes[0] if len(axes) == 1 else axes
    return drawn_on
