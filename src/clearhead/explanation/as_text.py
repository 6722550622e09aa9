"""An explanation as plain text, at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from clearhead.base.steps import Step
from clearhead.explanation.columns import KEPT, cut, left, printable, right, width, wrapped
from clearhead.explanation.shown import Shown, few_keys, narrowed
from clearhead.explanation.tables import Table, shape_of, tables, text_of, written_out

if TYPE_CHECKING:
    from clearhead.explanation.explanation import Part

Kind = Literal["title", "formula", "text", "numbers"]
COLUMNS = 80
NAMES = 14  # characters of a row's name
CELL = 10  # characters of a number
FIT = (COLUMNS - 4 - NAMES) // (CELL + 1)  # numbers to a row


def render(title: str, parts: Sequence[Part], shown: Shown) -> str:
    """The whole explanation."""
    return "\n".join(text for _, text in lines(title, parts, shown))


def lines(title: str, parts: Sequence[Part], shown: Shown) -> Iterator[tuple[Kind, str]]:
    """Each line with what it is, which says how a terminal shows it."""
    yield from (("title", line) for line in _wrap(title, ""))
    yield "title", "=" * min(width(printable(title)), COLUMNS)
    if shown.chosen:
        yield from (("text", line) for line in _wrap(f"Shown: {shown.chosen}.", ""))
    said = list(shown.left_out)
    if FIT < len(shown.keys) == shown.sizes.keys:
        said.append(few_keys(shown.sizes.keys, FIT))
    yield from (("text", line) for left_out in said for line in _wrap(f"Of {left_out}.", ""))
    few = narrowed(shown, FIT)
    for n, part in enumerate(parts, 1):
        yield from (("text", ""), ("title", f"{n}. {part.title}"))
        if part.drawn:
            yield "text", ""
        for line in part.drawn.splitlines():
            line = printable(line)
            whole = width(line) + 3 < COLUMNS
            yield from (("numbers", kept) for kept in ([f"   {line}".rstrip()] if whole else _wrap(line, "   ")))
        for step in part.steps:
            yield "text", ""
            yield from _step(step, shown, few)


def _step(step: Step, shown: Shown, few: Shown) -> Iterator[tuple[Kind, str]]:
    shape = shape_of(step, shown).replace(" ", KEPT)  # which is not broken over two lines
    yield from (("formula", line) for line in _wrap(f"{step.formula or step.name}{KEPT * 2} ({shape})", "   "))
    why = ("For comparison. " if step.aside else "") + step.why
    yield from (("text", line) for line in _wrap(why, "     "))
    for table in tables(step, few if step.value.is_floating_point() else shown):
        yield from (("numbers", line) for line in _lines(table))
    sentence = written_out(step, shown)
    if sentence:
        yield from (("numbers", line) for line in _wrap(sentence, "     "))


def _lines(table: Table) -> Iterator[str]:
    if table.caption:
        yield f"     {cut(table.caption, COLUMNS - 6)}:"
    names = [cut(name, NAMES) for name in table.rows]
    label = max(map(width, names), default=0)
    rows = [[text_of(x, table.kind) for x in row] for row in table.cells]
    cell = 1 if table.kind == "allowed" else max(CELL, *(len(x) for row in rows for x in row), 0)
    fit = (COLUMNS - 5 - label) // (cell + 1)
    columns = [cut(name, cell) for name in table.columns[:fit]]
    if cell > 1 and any(columns):
        yield f"     {' ' * label}{''.join(' ' + right(name, cell) for name in columns)}"
    for name, row in zip(names, rows, strict=True):
        yield f"     {left(name, label)}{''.join(' ' + x.rjust(cell) for x in row[:fit])}"
    more = len(table.columns) - fit
    missing = ", ".join(filter(None, [table.missing, f"{more} more columns are not printed" if more > 0 else ""]))
    if missing:
        yield f"     … {missing}"


def _wrap(text: str, indent: str) -> list[str]:
    return wrapped(text, indent, COLUMNS - 1)
