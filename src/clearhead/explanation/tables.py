"""The numbers of a step as tables with names of their rows and columns."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.base.steps import Step, number
from clearhead.explanation.shown import Shown

WIDTH = 64  # the most entries of a vector that any view holds


class Table(NamedTuple):
    """Some rows and columns of a step's result, and what they are called."""

    caption: str  # which sequence and head, where there are several
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: list[list[float]]
    kind: str  # "allowed": True and False, drawn as ■ and ·; "integer" or "number"
    missing: str  # how many rows and columns are not shown


def tables(step: Step, shown: Shown) -> list[Table]:
    """The tables of a step: one for each sequence and head that it has."""
    value, axes = step.value.detach().cpu(), step.axes
    lead = sum(axis in ("B", "H") for axis in axes)
    found = []
    for block in itertools.product(*(range(n) for n in value.shape[:lead])):
        caption = []
        for axis, size, at in zip(axes, value.shape, block, strict=False):
            if size > 1:
                caption.append(shown.name(axis, shown.places(axis, size)[at]))
        inner, names = value[block] if lead else value, axes[lead:]
        if inner.ndim > 2:  # a vector for each pair: the vector of the pair that is written out
            i, j = (at if n > 1 else 0 for at, n in zip(shown.pair[2:], inner.shape, strict=False))
            pairs = f", one of {inner.shape[0] * inner.shape[1]:,} pairs"
            caption.append(f"{shown.name('Lq', shown.queries[i])}, {shown.name('Lk', j)}{pairs}")
            inner, names = inner[i, j], names[2:]
            if block != tuple(at if n > 1 else 0 for at, n in zip(shown.pair, value.shape[:lead], strict=False)):
                continue
        found.append(_table(", ".join(caption), inner, names, shown))
    return found


def _table(caption: str, inner: Tensor, names: tuple[str, ...], shown: Shown) -> Table:
    while inner.ndim < 2:
        inner, names = inner.unsqueeze(0), ("", *names)
    rows, row_names, rows_left = _side(names[0], inner.shape[0], shown)
    columns, column_names, columns_left = _side(names[1], inner.shape[1], shown)
    part = inner[list(rows)][:, list(columns)]
    missing = ", ".join(f"{n:,} more {what}" for n, what in ((rows_left, "rows"), (columns_left, "columns")) if n)
    return Table(caption, row_names, column_names, part.double().tolist(), kind_of(inner), missing)


def kind_of(numbers: Tensor) -> str:
    if numbers.dtype == torch.bool:
        return "allowed"
    return "number" if numbers.dtype.is_floating_point else "integer"


def text_of(x: float, kind: str) -> str:
    """One cell of a table."""
    if kind == "allowed":
        return "■" if x else "·"
    return number(x) if kind == "number" else f"{x:.0f}"


def _side(axis: str, size: int, shown: Shown) -> tuple[tuple[int, ...], tuple[str, ...], int]:
    """Which entries of an axis are shown, their names, and how many entries are not shown."""
    if size == 1 and axis not in ("Lq", "Lk"):
        return (0,), ("",), 0
    every = axis == "Lk" and size == shown.sizes.keys
    chosen = shown.keys if every else tuple(range(min(size, WIDTH)))
    places = shown.places(axis, size)
    count = {"Lq": len(shown.queries), "Lk": shown.sizes.keys}.get(axis, 1)
    single = size == 1 and count > 1  # one row or column stands for all
    names = tuple(
        {"Lq": "every query", "Lk": "every key"}[axis] if single else shown.name(axis, places[n]) for n in chosen
    )
    return chosen, names, size - len(chosen)
