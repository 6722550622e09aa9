"""The command `clearhead report`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from clearhead.base.errors import ClearheadError, human_bytes, require
from clearhead.base.pages import check_writable, write_page
from clearhead.base.text import printable
from clearhead.cli.choice import chosen_calls, chosen_heads
from clearhead.cli.summary import Row, print_summary
from clearhead.cli.texts import Read, checked, model_of, quoted, text_of, watched
from clearhead.models.attention_call import AttentionCall
from clearhead.models.loading import bundled
from clearhead.report import Layer, render
from clearhead.report.of_heads import of_heads


def run(options: argparse.Namespace) -> None:
    """`clearhead report` with these options."""
    console = require("rich.console", "terminal", "the report's summary").Console(highlight=False)
    text = text_of(options)
    target = None if options.target is None else checked(options.target, "the target")
    _check_generate(options)
    check_writable(options.output)
    model, tokenizer, folder = model_of(options, _needs_head(options))
    read = watched(model, tokenizer, text, options.generate, target)
    calls = read.recording.calls
    chosen = chosen_calls([call.name for call in calls], options.layers)
    heads = [chosen_heads(options.heads, calls[i].query.shape[1], calls[i].name) for i in chosen]
    rows = [
        Row(i, calls[i].name, layer if some is None else of_heads(layer, some), some)
        for i, layer, some in zip(chosen, _layers(console, read, [calls[i] for i in chosen]), heads, strict=True)
    ]
    title = f"Attention of {_name(model, folder)}" + (f": {read.said}" if read.said else "")
    if read.answer is not None:
        _say(console, f"{type(model).__name__} generated: {quoted(read.answer) or 'no words'}")
    print_summary(console, title, rows, _tokens(read))
    page = render([row.layer for row in rows], title)
    _say(console, f"The page has {human_bytes(len(page.encode()))}.")
    path = write_page(options.output, page)
    _say(console, f"The report: {printable(str(path.resolve()))}")


def _check_generate(options: argparse.Namespace) -> None:
    if options.generate is not None and options.generate < 1:
        raise ClearheadError(f"--generate is {options.generate}; expected the most tokens to generate, 1 or more.")
    if options.generate is not None and options.target is not None:
        raise ClearheadError("--generate and --target are given: the decoder reads the one or the other.")


def _needs_head(options: argparse.Namespace) -> bool | None:
    """Whether the model has to generate: None where only an encoder-decoder has to."""
    return False if options.target is not None else None if options.generate is None else True


def _say(console: Any, line: str) -> None:
    console.print(line, soft_wrap=True, markup=False)


def _name(model: Any, folder: Path) -> str:
    name = "all-MiniLM-L6-v2" if folder == bundled() else folder.resolve().name
    return f"{type(model).__name__} ({name})"


def _tokens(read: Read) -> str:
    return f"{len(read.source)} and {len(read.words)} tokens" if read.source else f"{len(read.words)} tokens"


def _layers(console: Any, read: Read, calls: Iterable[AttentionCall]) -> Iterator[Layer]:
    track = require("rich.progress", "terminal", "the progress bar").track
    for call in track(list(calls), description="Looking at each layer", console=console, transient=True):
        yield from read.layers([call])
