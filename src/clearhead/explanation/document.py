"""An explanation as a document: parts, entries, tables, sentences. Text, Markdown, HTML, script and page print it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.base.symbolic.steps import Step, number
from clearhead.explanation.inputs import letters
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


LONG = 300  # the most characters of a number that is written out


@dataclass(frozen=True, eq=False)
class Part:
    """Steps that belong together, under a title, with lines that are drawn before them.

    `letters_of`: the leading axes of the scores, among "B" and "H", where the part begins with how to read formulas.
    """

    title: str
    steps: tuple[Step, ...]
    drawn: str = ""
    letters_of: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Entry:
    """A step, and the part of the call that is shown."""

    step: Step
    shown: Shown

    @property
    def formula(self) -> str:
        return self.step.formula or self.step.name

    @property
    def shape(self) -> str:
        """The shape, each size with its name: `B 2, Lq 3, Lk 4`."""
        pairs = zip(self.step.axes, self.step.value.shape, strict=True)
        named = [f"{axis} {n}" if axis != "1" else "1" for axis, n in pairs if axis not in self.shown.absent]
        return ", ".join(named) or "one number"

    @property
    def tables(self) -> list[Table]:
        return tables(self.step, self.shown)

    @property
    def sentence(self) -> str:
        """How one number is made of the numbers above, as `scores[0, 1] = 1·2 + 3·4 = 14`, or
        `mask[0, 1]: 1 <= 0 is False`.

        Empty where the step's numbers are given, and where the sentence would be too long.
        """
        step, shown = self.step, self.shown
        if not step.written or len(step.written) > LONG:
            return ""
        index, names = at_pair(step, shown), []
        for axis, at, size in zip(step.axes, index, step.value.shape, strict=True):
            count = {"B": len(shown.batches), "H": len(shown.heads)}.get(axis, 2)
            if axis != "1" and not (count == 1 and shown.sizes.shape["BH".index(axis)] == 1):
                names.append(str(shown.places(axis, size)[at]))
        value, kind = step.value[index], kind_of(step.value)
        result = str(bool(value)) if kind == "allowed" else text_of(float(value), kind)
        place = f"{step.name}[{', '.join(names)}]" if names else step.name
        if step.written == result:
            return ""
        return f"{place}: {step.written} is {result}" if kind == "allowed" else f"{place} = {step.written} = {result}"

    @property
    def facts(self) -> dict[str, Any]:
        """The step's name, formula, reason, code and shape, without its numbers."""
        names = ("name", "formula", "why", "given", "aside", "code")
        return {name: getattr(self.step, name) for name in names} | {"shape": self.shape}

    @property
    def record(self) -> dict[str, Any]:
        """The entry as plain numbers and text."""
        plain = [t._asdict() | {"cells": [list(map(_plain, row)) for row in t.cells]} for t in self.tables]
        return self.facts | {"written_out": self.sentence, "tables": plain}


class Section(NamedTuple):
    """A part of a document."""

    title: str
    drawn: str
    entries: list[Entry]


@dataclass(frozen=True)
class Document:
    """The content of an explanation, which text, Markdown, HTML, script and page print."""

    title: str
    parts: tuple[Part, ...]
    shown: Shown
    digits: int

    @property
    def notes(self) -> list[str]:
        """Sentences that say which part of the call is shown, and what is left out."""
        chosen = [f"Shown: {self.shown.chosen}."] if self.shown.chosen else []
        return [*chosen, *(f"Of {left_out}." for left_out in self.shown.left_out)]

    @property
    def sections(self) -> Iterator[Section]:
        formulas = [step.formula for part in self.parts for step in part.steps]
        for part in self.parts:
            lines = [part.drawn] if part.drawn else []
            if part.letters_of is not None:
                lines.append(letters(part.letters_of, formulas))
            yield Section(part.title, "\n".join(lines), [Entry(step, self.shown) for step in part.steps])

    @property
    def record(self) -> dict[str, Any]:
        """The document as plain numbers and text."""
        parts = [{"title": s.title, "drawn": s.drawn, "steps": [e.record for e in s.entries]} for s in self.sections]
        return {"title": self.title, "left_out": list(self.shown.left_out), "parts": parts}


def at_pair(step: Step, shown: Shown) -> tuple[int, ...]:
    """The index of the step's number that is written out: the place of the pair, and 0 on any other axis."""
    places = dict(zip(("B", "H", "Lq", "Lk"), shown.pair, strict=True)) | {"L": shown.pair[2]}
    return tuple(places.get(axis, 0) if n > 1 else 0 for axis, n in zip(step.axes, step.value.shape, strict=True))


def _plain(x: float) -> float | str:
    return x if math.isfinite(x) else str(x)
