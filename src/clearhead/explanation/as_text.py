"""An explanation as plain text of at most 80 columns, whatever words it holds."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from clearhead.base.output.text import KEPT, printable
from clearhead.explanation.document import Document, Entry, Table, text_of
from clearhead.explanation.shown import Shown, few_keys, narrowed

Kind = Literal["title", "formula", "text", "numbers"]
COLUMNS = 80
NAMES = 14  # characters of a row's name
CELL = 10  # characters of a number
FIT = (COLUMNS - 4 - NAMES) // (CELL + 1)  # numbers to a row
LIVING = 'As a page that computes: .write("page.html"), .frame() in a notebook, -o page.html in a terminal.'
FILLER = "\0"  # stands behind each character that is two columns wide, so that a length is a width


def render(document: Document) -> str:
    """The whole explanation."""
    return "\n".join(text for _, text in lines(document))


def lines(document: Document) -> Iterator[tuple[Kind, str]]:
    """The lines, each with its kind, by which a terminal styles it."""
    shown, notes = document.shown, document.notes
    few = narrowed(shown, FIT)
    if FIT < len(shown.keys) == shown.sizes.keys:
        notes = [*notes, f"Of {few_keys(shown.sizes.keys, FIT)}."]
    yield from (("title", line) for line in wrapped(document.title, ""))
    yield "title", "=" * min(width(printable(document.title)), COLUMNS)
    yield from (("text", line) for note in notes for line in wrapped(note, ""))
    for n, section in enumerate(document.sections, 1):
        yield from (("text", ""), ("title", f"{n}. {section.title}"))
        if section.drawn:
            yield "text", ""
        for line in map(printable, section.drawn.splitlines()):
            whole = width(line) + 3 < COLUMNS
            yield from (("numbers", kept) for kept in ([f"   {line}".rstrip()] if whole else wrapped(line, "   ")))
        for entry in section.entries:
            yield "text", ""
            yield from _entry(entry, few)
    yield from (("text", line) for line in ("", *wrapped(LIVING, "")))


def _entry(entry: Entry, few: Shown) -> Iterator[tuple[Kind, str]]:
    shape = entry.shape.replace(" ", KEPT)  # so that the shape is not broken over two lines
    yield from (("formula", line) for line in wrapped(f"{entry.formula}{KEPT * 2} ({shape})", "   "))
    why = ("For comparison. " if entry.step.aside else "") + entry.step.why
    yield from (("text", line) for line in wrapped(why, "     "))
    narrow = replace(entry, shown=few) if entry.step.value.is_floating_point() else entry
    yield from (("numbers", line) for table in narrow.tables for line in _lines(table))
    yield from (("numbers", line) for line in wrapped(entry.sentence, "     "))


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
        yield f"     {' ' * label}{''.join(' ' * (1 + cell - width(name)) + name for name in columns)}"
    for name, row in zip(names, rows, strict=True):
        yield f"     {name}{' ' * (label - width(name))}{''.join(' ' + x.rjust(cell) for x in row[:fit])}"
    more = len(table.columns) - fit
    missing = ", ".join(filter(None, [table.missing, f"{more} more columns are not printed" if more > 0 else ""]))
    if missing:
        yield f"     … {missing}"


# ---- Columns of a terminal


def width(text: str) -> int:
    """How many columns the text takes: a wide East Asian character takes two, a combining accent none."""
    return len(_filled(text)) - sum(unicodedata.category(c) in ("Mn", "Me") for c in text)


def cut(word: str, most: int) -> str:
    """The name, cut to at most this many columns."""
    shown = printable(word)
    if width(shown) <= most:
        return shown
    filled = _filled(shown) + " "
    return _plain(filled[: most - 1 - (filled[most - 1] == FILLER)]) + "…"


def wrapped(text: str, indent: str) -> list[str]:
    """The text in lines of at most `COLUMNS`. The first begins with `indent`, the others with two more spaces."""
    filled = _filled(printable(text))
    lines = textwrap.wrap(
        filled, COLUMNS - 1, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )
    return [_plain(line).replace(KEPT, " ").rstrip() for line in lines]


def _filled(text: str) -> str:
    return "".join(c + FILLER * (unicodedata.east_asian_width(c) in "WF") for c in text)


def _plain(text: str) -> str:
    return text.replace(FILLER, "")
