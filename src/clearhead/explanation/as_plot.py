"""A step of an explanation as pictures: one for each sequence and head."""

from __future__ import annotations

import numpy as np

from clearhead.base.output.pictures import Axes, Panel, Side, Style, draw
from clearhead.base.symbolic.formulas import number
from clearhead.base.symbolic.steps import Step
from clearhead.explanation.document import tables
from clearhead.explanation.shown import Shown


def plot(step: Step, shown: Shown, ax: Axes | None) -> Axes | np.ndarray:
    """Draw a step. Returns the axes, or an array of axes for several pictures. `ax`: the axes for one picture."""
    every, panels = tables(step, shown), list[Panel]()
    for table in every:
        cells = np.array(table.cells, dtype=float)
        panels.append(Panel(cells, np.isneginf(cells), ", ".join(filter(None, [step.name, table.caption]))))
    signed = bool((step.value < 0).any()) and step.value.is_floating_point()
    style = Style(cmap="RdBu_r" if signed else "GnBu", scale="signed" if signed else "linear", ax=ax, write=number)
    rows, columns = (Side("", len(names), names) for names in (every[0].rows, every[0].columns))
    return draw(panels, rows, columns, style, step.name.replace("_", " "))
