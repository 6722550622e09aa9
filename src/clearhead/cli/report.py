"""The command `clearhead report`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from clearhead.base.errors import ClearheadError, human_bytes, require
from clearhead.base.output.text import printable, short
from clearhead.base.output.written import check_page_ending
from clearhead.base.selected import numbers_of
from clearhead.cli.texts import Read, check_outputs, checked, layer_of, model_of, quoted, text_of, watched
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.models.recordings.calls import chosen_calls
from clearhead.models.views.beside import Beside
from clearhead.models.views.framed import opened
from clearhead.models.views.paged import Paged
from clearhead.report.layer import Layer, LeftOut, of_heads


class LayerSummary(NamedTuple):
    """The figures of one call: means over the queries that see something."""

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
    sink = layer.key_tokens[key], key, float(received[key] / max(sees.sum(), 1))
    return LayerSummary((low, float(entropy[low])), (high, float(entropy[high])), sink, distance)


# a layer: its label, its module's name, its figures, and the numbers of its heads, None where it has all
Row = tuple[str, str, LayerSummary, list[int] | None]


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
            f"{escape(short(printable(word), 12))} @{place}: {share:.0%}",
            "" if figures.distance is None else f"{figures.distance:.1f}",
        )
    console.print(table)


RANGE = re.compile(r"(-?[0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)
COMMA = re.compile(r",(?! *(?:cross|run|step)\b)")  # separates items; the name of a layer may contain a comma


def run(options: argparse.Namespace) -> None:
    """`clearhead report` with these options."""
    console = require("rich.console", "terminal", "the report's summary").Console(highlight=False)
    check_outputs(options, {"-o": options.output}, options.file)
    check_page_ending(options.output)
    text = text_of(options)
    target = None if options.target is None else checked(options.target, "the target")
    _check_generate(options)
    # without a target an encoder-decoder has to generate; others have to where --generate asks for it
    head = False if options.target is not None else None if options.generate is None else True
    model, tokenizer, folder = model_of(options, head)
    read = watched(model, tokenizer, text, options.generate, target)
    calls = read.recording.calls
    chosen = _calls_of(calls, options.layers)
    heads = [_chosen_heads(options.heads, calls[i].query.shape[1], calls[i].name) for i in chosen]
    opens = None
    if options.layer is not None or options.head is not None:
        layer = None if options.layer is None else layer_of(options.layer)
        opens = opened(calls, chosen, heads, layer, options.head, ("--layer", "--head"))
    both = [read]
    if options.beside is not None:
        both.append(watched(model, tokenizer, checked(options.beside, "--beside"), options.generate, target))
    shown = Beside(*(each.paged() for each in both)) if len(both) > 1 else read.paged()
    rows = list[Row]()
    name = "all-MiniLM-L6-v2" if options.model is None else folder.resolve().name
    title = f"Attention of {type(model).__name__} ({name})" + (f": {read.said}" if read.said else "")
    page = shown.page(_layers(console, shown, chosen, heads, rows), title)
    if opens is not None:
        page.open_on(*opens)
    for each in both:
        if each.spelled:
            page.spell(each.source or each.words, each.spelled)
    if read.answer is not None:
        _say(console, f"{type(model).__name__} generated: {quoted(read.answer) or 'no words'}")
    print_summary(console, title, rows, _tokens(read))
    if len(both) > 1 and page.distinctive is not None:
        _say(console, f"Beside {_tokens(both[1])}: {page.distinctive['sentence']}")
    _say(console, f"The page has {human_bytes(page.size())}.")
    path = page.write(options.output)
    _say(console, f"The report: {printable(str(path.resolve()))}")


def _check_generate(options: argparse.Namespace) -> None:
    if options.generate is not None and options.generate < 1:
        raise ClearheadError(f"--generate is {options.generate}; expected the most tokens to generate, 1 or more.")
    if options.generate is not None and options.target is not None:
        raise ClearheadError("--generate and --target are given: the decoder reads the one or the other.")


def _say(console: Any, line: str) -> None:
    console.print(line, soft_wrap=True, markup=False)


def _tokens(read: Read) -> str:
    return f"{len(read.source)} and {len(read.words)} tokens" if read.source else f"{len(read.words)} tokens"


def _layers(
    console: Any, paged: Paged | Beside, calls: Sequence[int], heads: Sequence[list[int] | None], rows: list[Row]
) -> Iterator[Layer | LeftOut]:
    """The layers of these calls, cut to these heads. Each adds its row to the summary."""
    track = require("rich.progress", "terminal", "the progress bar").track
    asked = list(zip(calls, heads, strict=True))
    for number, some in track(asked, description="Looking at each layer", console=console, transient=True):
        layer = paged.layer(number)
        if isinstance(layer, LeftOut):
            _say(console, f"Left out: {printable(layer.name)}: {layer.reason}")
        else:
            layer = layer if some is None else of_heads(layer, some)
            rows.append((layer.label, paged.calls[number].name, summarise(layer), some))
        yield layer


def _calls_of(calls: Sequence[AttentionCall], layers: str | None) -> list[int]:
    """The numbers of the calls that `layers` names, in its order: a list of numbers, ranges, names and patterns."""
    if layers is None:
        return list(range(len(calls)))
    found: list[int] = []
    for item in map(str.strip, COMMA.split(layers)):
        numbers = _range("--layers", item)
        found += chosen_calls(calls, item if numbers is None else numbers, "--layers")
    return list(dict.fromkeys(found))


def _chosen_heads(heads: str | None, count: int, name: str) -> list[int] | None:
    """The numbers of the heads that a list of numbers and ranges names, sorted; None for all heads."""
    if heads is None:
        return None
    found: list[int] = []
    for item in map(str.strip, heads.split(",")):
        numbers = _range("--heads", item)
        if numbers is None:
            raise ClearheadError(f"--heads is {heads!r:.80}; expected numbers and ranges, such as 0-3,7.")
        found += numbers_of(numbers, count, "--heads", f"{name} has {count} heads")
    return sorted(set(found))


def _range(option: str, item: str) -> list[int] | None:
    """The numbers of an item such as `3`, `-1` or `5-7`; None for any other text."""
    match = RANGE.fullmatch(item)
    if match is None:
        return None
    low, high = int(match[1]), int(match[2] or match[1])
    if high < low:
        raise ClearheadError(f"{option}: the range {item!r} is empty; pass it as {high}-{low}.")
    return list(range(low, high + 1))
