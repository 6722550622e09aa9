"""The summary of a report in a terminal: a few figures for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from clearhead.base.errors import require
from clearhead.base.text import printable
from clearhead.report.layer import Layer


@dataclass(frozen=True)
class LayerSummary:
    """The figures of one call: means over the queries that see something."""

    name: str
    kind: str
    focused: tuple[int, float]  # the head of the least mean entropy, and this entropy in nats
    diffuse: tuple[int, float]  # the head of the largest mean entropy
    sink: tuple[str, int, float]  # the key that receives the most weight over all heads: its word, place and share
    distance: float | None  # mean distance in positions, over all heads; None for cross attention


def summarise(layer: Layer) -> LayerSummary:
    """The most focused and the most diffuse head, the sink and the mean distance of a call."""
    sees = np.isfinite(layer.logsumexp)  # (H, Lq)
    count = np.maximum(sees.sum(1), 1)
    entropy = (layer.entropy * sees).sum(1) / count
    low, high = int(entropy.argmin()), int(entropy.argmax())
    received = layer.received.sum(0)
    key = int(received.argmax())
    distance = None if layer.distance is None else float((layer.distance * sees).sum() / max(sees.sum(), 1))
    return LayerSummary(
        name=layer.name,
        kind=layer.kind,
        focused=(low, float(entropy[low])),
        diffuse=(high, float(entropy[high])),
        sink=(layer.key_tokens[key], key, float(received[key] / max(sees.sum(), 1))),
        distance=distance,
    )


class Row(NamedTuple):
    """A layer: its label, its module's name, its figures, and the numbers of its heads, None where it has all."""

    label: str
    name: str
    figures: LayerSummary
    heads: list[int] | None


def print_summary(console: Any, title: str, rows: Sequence[Row], size: str) -> None:
    """Print a table of the layers."""
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
    """A token as at most 12 printable characters."""
    shown = printable(word)
    return shown if len(shown) <= 12 else shown[:11] + "…"
