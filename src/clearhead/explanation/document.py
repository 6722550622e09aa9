"""An explanation as a document: parts, entries, tables, sentences. Text, Markdown, HTML, script and page print it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from clearhead.base.steps import Step
from clearhead.explanation.shown import Shown
from clearhead.explanation.tables import Table, kind_of, tables, text_of

LONG = 300  # the most characters of a number that is written out


@dataclass(frozen=True, eq=False)
class Part:
    """Steps that belong together, under a title, with lines that are drawn before them."""

    title: str
    steps: tuple[Step, ...]
    drawn: str = ""


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
        """How one number is made of the numbers above, as `scores[0, 1] = 1·2 + 3·4 = 14`.

        Empty where the step's numbers are given, and where the sentence would be too long.
        """
        step, shown = self.step, self.shown
        if step.cell is None:
            return ""
        index, names = at_pair(step, shown), []
        for axis, at, size in zip(step.axes, index, step.value.shape, strict=True):
            count = {"B": len(shown.batches), "H": len(shown.heads)}.get(axis, 2)
            if axis != "1" and not (count == 1 and shown.sizes.shape["BH".index(axis)] == 1):
                names.append(str(shown.places(axis, size)[at]))
        made, value, kind = step.cell(index), step.value[index], kind_of(step.value)
        result = str(bool(value)) if kind == "allowed" else text_of(float(value), kind)
        place = f"{step.name}[{', '.join(names)}]" if names else step.name
        return f"{place} = {made} = {result}" if made != result and len(made) <= LONG else ""

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

    @property
    def notes(self) -> list[str]:
        """Sentences that say which part of the call is shown, and what is left out."""
        chosen = [f"Shown: {self.shown.chosen}."] if self.shown.chosen else []
        return [*chosen, *(f"Of {left_out}." for left_out in self.shown.left_out)]

    @property
    def sections(self) -> Iterator[Section]:
        for part in self.parts:
            yield Section(part.title, part.drawn, [Entry(step, self.shown) for step in part.steps])

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
