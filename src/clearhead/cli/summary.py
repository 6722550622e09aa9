"""The report's summary in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from clearhead.base.errors import require
from clearhead.base.text import printable
from clearhead.report.summary import LayerSummary


class Row(NamedTuple):
    """A layer in figures; what it is called, its module's name; and the numbers of its heads, None where it has all."""

    label: str
    name: str
    figures: LayerSummary
    heads: list[int] | None


def print_summary(console: Any, title: str, rows: Sequence[Row], size: str) -> None:
    """A table of the layers."""
    table_module = require("rich.table", "terminal", "the report's summary")
    escape = require("rich.markup", "terminal", "the report's summary").escape
    simple = require("rich.box", "terminal", "the report's summary").SIMPLE
    caption = "Heads with their mean entropy in nats; the sink with its share; the mean distance in tokens."
    table = table_module.Table(title=f"{escape(printable(title))}, {size}", caption=caption, box=simple, pad_edge=False)
    for column in ("", "layer", "most focused", "most diffuse", "sink", "distance"):
        table.add_column(column, justify="right" if column == "distance" else "left", no_wrap=column != "layer")
    table.columns[0].max_width, table.columns[0].no_wrap = 11, False  # "decoder 10,", and below it "cross"
    table.columns[1].overflow = "fold"
    for label, name, figures, heads in rows:
        focused, diffuse = (
            f"{head if heads is None else heads[head]}: {entropy:.2f}"
            for head, entropy in (figures.focused, figures.diffuse)
        )
        word, place, share = figures.sink
        table.add_row(
            escape(label),
            escape(printable(name)),
            focused,
            diffuse,
            f"{escape(_short(word))} @{place}: {share:.0%}",
            "" if figures.distance is None else f"{figures.distance:.1f}",
        )
    console.print(table)


def _short(word: str) -> str:
    """A token in one line."""
    shown = printable(word)
    return shown if len(shown) <= 12 else shown[:11] + "…"
