"""The command `clearhead`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from clearhead.base.errors import ClearheadError, require
from clearhead.base.pages import write_page
from clearhead.models.attention_call import AttentionCall
from clearhead.models.loading import bundled, load, reason
from clearhead.models.recording import Recording
from clearhead.models.watch import watch
from clearhead.report import Layer, render
from clearhead.report.summary import summarise


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. A bad input is one clear line on standard error, and status 2."""
    options = _parser().parse_args(arguments)
    try:
        _report(options)
    except ClearheadError as error:
        print(f"clearhead: {error}", file=sys.stderr)
        return 2
    except (OSError, RecursionError) as error:  # of a disk that is full, a name too long, a file nested too deeply
        print(f"clearhead: {type(error).__name__}: {error!s:.200}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="clearhead", description="Look into the attention of a model.")
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser(
        "report",
        help="watch a model read a text, and write a page that shows its attention",
        description="Watch a model read a text; print a summary, and write a self-contained HTML page.",
    )
    text = report.add_mutually_exclusive_group()
    text.add_argument("text", nargs="?", metavar="TEXT", help="the text to read")
    text.add_argument("--file", metavar="F", help="a file that holds the text")
    report.add_argument(
        "--model",
        metavar="DIR",
        help="a folder with a model and its tokenizer, both saved with save_pretrained() (default: a small BERT)",
    )
    report.add_argument(
        "--layers", metavar="LIST", help="which attention calls to show, such as 0,2,5-7 (default: all)"
    )
    report.add_argument("-o", "--output", metavar="FILE", default="report.html", help="the page (default: %(default)s)")
    return parser


def _report(options: argparse.Namespace) -> None:
    rich = require("rich.console", "terminal", "the report's summary")
    console = rich.Console()
    text = _text(options)
    folder = bundled() if options.model is None else Path(options.model)
    model, tokenizer = load(folder)
    recording, tokens, cut = _watch(model, tokenizer, text)
    if cut:
        console.print(f"The model reads at most {len(tokens)} tokens: {cut} more were left out.", style="yellow")
    chosen = _choose(len(recording.calls), options.layers)
    recording = Recording([recording.calls[i] for i in chosen])
    layers = recording.layers(tokens, progress=lambda calls: _progress(console, calls))
    title = f"Attention of {_name(model, folder)}"
    path = write_page(options.output, render(layers, title))
    _summary(console, title, dict(zip(chosen, layers, strict=True)), len(tokens))
    console.print(f"The report: {_printable(str(path.resolve()))}", soft_wrap=True, highlight=False, markup=False)


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
    if any("\ud800" <= c <= "\udfff" for c in text):  # bytes of the command line that are no character
        raise ClearheadError("the text is not UTF-8: pass it in a file, and convert that (iconv -t UTF-8).")
    if not text.strip():
        raise ClearheadError("the text is empty.")
    return text


def _watch(model: Any, tokenizer: Any, text: str) -> tuple[Recording, list[str], int]:
    """The recording of the model, the tokens that it read, and how many were left out."""
    try:
        return _read(model, tokenizer, text)
    except ClearheadError:
        raise
    except Exception as error:  # any error of a tokenizer and a model that do not match
        raise ClearheadError(
            f"{type(model).__name__} cannot read the text: {reason(error)}\nThe folder needs a model of texts, and the "
            "tokenizer that it was trained with."
        ) from error


def _read(model: Any, tokenizer: Any, text: str) -> tuple[Recording, list[str], int]:
    every = tokenizer(text, return_tensors="pt", verbose=False)
    limit = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None) or sys.maxsize)
    total = every["input_ids"].shape[1]
    inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=limit) if total > limit else every
    ids = inputs["input_ids"]
    if model.config.is_encoder_decoder:  # the decoder reads the same text
        inputs["decoder_input_ids"] = ids
    with torch.inference_mode(), watch(model) as recording:
        model(**inputs)
    numbers = ids[0].tolist()
    words = [str(n) if w is None else w for n, w in zip(numbers, tokenizer.convert_ids_to_tokens(numbers), strict=True)]
    return recording, words, max(total - limit, 0)


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


def _printable(text: str) -> str:
    """Control characters, and bytes of a path that are no character, are shown and not sent to the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _short(word: str) -> str:
    """A token in one line."""
    shown = _printable(word)
    return shown if len(shown) <= 12 else shown[:11] + "…"


def _summary(console: Any, title: str, layers: dict[int, Layer], tokens: int) -> None:
    table_module = require("rich.table", "terminal", "the report's summary")
    escape = require("rich.markup", "terminal", "the report's summary").escape
    simple = require("rich.box", "terminal", "the report's summary").SIMPLE
    caption = "Heads with their mean entropy in nats; the sink with its share; the mean distance in tokens."
    table = table_module.Table(title=f"{escape(_printable(title))}, {tokens} tokens", caption=caption, box=simple)
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


if __name__ == "__main__":
    raise SystemExit(main())
