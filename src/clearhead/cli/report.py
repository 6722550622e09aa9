"""The command `clearhead report`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from clearhead.base.errors import ClearheadError, require
from clearhead.base.pages import write_page
from clearhead.cli.texts import add_model, checked, model_of, watched
from clearhead.explanation.columns import printable
from clearhead.models.attention_call import AttentionCall
from clearhead.models.loading import bundled
from clearhead.models.recording import Recording
from clearhead.report import Layer, render
from clearhead.report.summary import summarise


def add(commands: Any) -> None:
    """Add the command to those of the parser."""
    report = commands.add_parser(
        "report",
        help="watch a model read a text, and write a page that shows its attention",
        description="Watch a model read a text; print a summary, and write a self-contained HTML page.",
    )
    text = report.add_mutually_exclusive_group()
    text.add_argument("text", nargs="?", metavar="TEXT", help="the text to read")
    text.add_argument("--file", metavar="F", help="a file that holds the text")
    add_model(report)
    report.add_argument(
        "--layers", metavar="LIST", help="which attention calls to show, such as 0,2,5-7 (default: all)"
    )
    report.add_argument("-o", "--output", metavar="FILE", default="report.html", help="the page (default: %(default)s)")
    report.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> None:
    rich = require("rich.console", "terminal", "the report's summary")
    console = rich.Console()
    text = _text(options)
    model, tokenizer, folder = model_of(options)
    recording, tokens, cut = watched(model, tokenizer, text)
    if cut:
        console.print(f"The model reads at most {len(tokens)} tokens: {cut} more were left out.", style="yellow")
    chosen = _choose(len(recording.calls), options.layers)
    recording = Recording([recording.calls[i] for i in chosen])
    layers = recording.layers(tokens, progress=lambda calls: _progress(console, calls))
    title = f"Attention of {_name(model, folder)}"
    path = write_page(options.output, render(layers, title))
    _summary(console, title, dict(zip(chosen, layers, strict=True)), len(tokens))
    console.print(f"The report: {printable(str(path.resolve()))}", soft_wrap=True, highlight=False, markup=False)


def _name(model: Any, folder: Path) -> str:
    return f"{type(model).__name__} ({'all-MiniLM-L6-v2' if folder == bundled() else folder.resolve().name})"


def _text(options: argparse.Namespace) -> str:
    if options.file is not None:
        try:
            text = Path(options.file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ClearheadError(f"the text {options.file!r} is not UTF-8: {error}.") from error
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise ClearheadError(
                f"cannot read the text {options.file!r}: {getattr(error, 'strerror', None) or error}."
            ) from error
    elif options.text is not None:
        text = options.text
    else:
        raise ClearheadError("no text: pass it as TEXT, or in a file with --file F.")
    return checked(text)


def _choose(calls: int, layers: str | None) -> list[int]:
    """The numbers of the calls to show."""
    if layers is None:
        return list(range(calls))
    chosen: list[int] = []
    for item in layers.split(","):
        first, dash, last = item.strip().partition("-")
        numbers = [first, last] if dash else [first, first]
        if not all(number.isascii() and number.isdecimal() and len(number) < 10 for number in numbers):
            raise ClearheadError(f"--layers is {layers!r:.80}; expected numbers and ranges, such as 0,2,5-7.")
        low, high = map(int, numbers)
        if high < low:
            raise ClearheadError(f"--layers is {layers!r}, and the range {item.strip()!r} is empty.")
        if high >= calls:
            raise ClearheadError(f"--layers is {layers!r}, and the model made {calls} calls: 0 to {calls - 1}.")
        chosen += range(low, high + 1)
    return list(dict.fromkeys(chosen))


def _progress(console: Any, calls: Iterable[AttentionCall]) -> Iterator[AttentionCall]:
    track = require("rich.progress", "terminal", "the progress bar").track
    yield from track(list(calls), description="Looking at each layer", console=console, transient=True)


def _short(word: str) -> str:
    """A token in one line."""
    shown = printable(word)
    return shown if len(shown) <= 12 else shown[:11] + "…"


def _summary(console: Any, title: str, layers: dict[int, Layer], tokens: int) -> None:
    table_module = require("rich.table", "terminal", "the report's summary")
    escape = require("rich.markup", "terminal", "the report's summary").escape
    simple = require("rich.box", "terminal", "the report's summary").SIMPLE
    caption = "Heads with their mean entropy in nats; the sink with its share; the mean distance in tokens."
    table = table_module.Table(title=f"{escape(printable(title))}, {tokens} tokens", caption=caption, box=simple)
    for column in ("#", "layer", "most focused", "most diffuse", "sink", "distance"):
        table.add_column(column, justify="right" if column == "distance" else "left", no_wrap=column != "layer")
    table.columns[1].overflow = "fold"
    for i, layer in layers.items():
        figures = summarise(layer)
        word, place, share = figures.sink
        table.add_row(
            str(i),
            escape(layer.name) + (" (cross)" if layer.kind == "cross" else ""),
            f"{figures.focused[0]}: {figures.focused[1]:.2f}",
            f"{figures.diffuse[0]}: {figures.diffuse[1]:.2f}",
            f"{escape(_short(word))} @{place}: {share:.0%}",
            "" if figures.distance is None else f"{figures.distance:.1f}",
        )
    console.print(table)
