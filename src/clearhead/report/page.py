"""Writes the report: one HTML file with its data, its style and its program inside.

The page needs no network and runs nothing but its own scripts: a policy in its head names them by hash. What comes from
the model (names, tokens) is data in a JSON block, and reaches the page as text. See `front/` for the program, one
concern a file; `packaging/bundle.mjs` makes one script of them, which stands there deflated; `load.js` unpacks it.

**The data** are `meta`, JSON, and blocks, see `_blocks.py`. Where an array stands is a number, 8 · block + place; a
list of these is one array in several parts. `front/data.js` reads them: `new Run(source)`, of a page or of messages.

`meta`:
  title; texts: lists of tokens; originals: {text: {token: spelling}} of words that the tokenizer does not know;
  steps: lists of {name, formula, tree}, as `base/front/language.js` says it, null where the step is given;
  measures: [{name, says, formula, range, does}], those that some head has;
  distinctive: {layer, head, sentence, measure, nearUniform}, layer and head by their places in this page, or null;
  leftOut: [{name, reason}], calls that are not shown;
  beside: [[layer, layer], …], of two recordings on one page the calls of the same number, by their places in this page;
  aligned: [{texts: [text, text], positions: [[…], […]]}, …], the positions of two texts that correspond, ascending;
    texts of one length that are not named here correspond position by position;
  layers: [{name, label, kind, role, queryText, keyText, queries, keys, position, answer, phi, features, pairs, scale,
    softcap, error, why, whyBlind, thumbnail, shared, heads}].
    position: where query 0 stands among the keys, or null. answer: the first query that the model generated, or null.
    phi: null where scores are given. pairs: [feature, feature, positions of a turn or null], of rotary positions.
    thumbnail: {block, rows, columns}: where the bytes of all heads stand, each rows × columns: see `codes.py`.
    heads: [{number, query, key, scores, start, …, sink, measures, pyramid}], and shared: the same of all heads.

A head, beside what is for `layers`:
  query (queries, features), key (keys, features); weight (features), where φ's terms are weighted; or scores;
  start, stop (queries): the keys that a query may see; counts (queries): how many they are; expected (keys): what each
    would receive of uniform attention under the same mask;
  relative (queries + keys − 1), dense {rows, columns, values}, tiles {side, places, values}: what is added to scores;
  holes {side, places, values}: bits, 1 for what the spans do not hide, but the mask does;
  values (keys): the length of each value vector, where values were kept;
  logsumexp, entropy, received, distance: not there where `rowsOf` in `weights.js` computes them at once;
  sink: the score of the sink;
  measures: [[value, of uniform attention, key], …] in the order of meta.measures, 0 where there is none;
  pyramid: {max, mean, rows, columns, perRow, perColumn}, of what is longer than 1,024: see `codes.py`.
Entropy, received and distance are of the weights divided by their sum, where a sink has a share of all.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clearhead.base.errors import UnsupportedError
from clearhead.base.pages import embedded, filled, filled_parts, policy, program, source, style, write_parts
from clearhead.report._blocks import PLACES, Blocks
from clearhead.report.describe import described, measured
from clearhead.report.layer import Layer, LeftOut, Measures

# What is said of a head that is not where an array stands.
NO_PLACES = ("number", "sink", "rows", "columns", "perRow", "perColumn", "side")

Positions = tuple[Sequence[int], Sequence[int]]

STRICT = '"use strict";'  # first in a program


class Page:
    """A page that is made a layer at a time: what is added is compressed, in a file of its own, until it is written."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.distinctive: Mapping[str, Any] | None = None
        self.beside: list[tuple[int, int]] = []
        self._originals: dict[int, Mapping[int, str]] = {}
        self._aligned: dict[tuple[int, int], Positions] = {}
        self._blocks, self._texts, self._steps = Blocks(), _Once(), _Once()
        self._layers: list[dict[str, Any]] = []
        self._measures: list[Sequence[Measures]] = []
        self._left_out: list[LeftOut] = []

    def add(self, layer: Layer | LeftOut) -> None:
        """One more layer, after the others; or the word that a call is left out."""
        if isinstance(layer, LeftOut):
            self._left_out.append(layer)
            return
        texts = [self._texts.add([str(token) for token in side]) for side in (layer.query_tokens, layer.key_tokens)]
        steps = [self._steps.add(list(each)) for each in (layer.steps, layer.blind_steps)]
        meta = described(layer, (texts[0], texts[1]), (steps[0], steps[1]), self._blocks)
        own = layer.label or f"L{len(self._layers)}"
        taken = {other["label"] for other in self._layers}
        labels = (own, *(f"{own}#{number}" for number in range(2, len(taken) + 2)))
        meta["label"] = next(label for label in labels if label not in taken)
        self._layers.append(meta)
        self._measures.append(layer.measures or [{}] * layer.heads)

    def spell(self, tokens: Sequence[str], originals: Mapping[int, str]) -> None:
        """How the tokens of a text that the tokenizer does not know were spelled, by their places."""
        self._originals[self._texts.add([str(token) for token in tokens])] = originals

    def align(self, tokens: Sequence[str], other_tokens: Sequence[str], positions: Positions) -> None:
        """Which positions of two texts correspond."""
        one, other = (self._texts.add([str(token) for token in side]) for side in (tokens, other_tokens))
        self._aligned[one, other] = positions

    @property
    def shown(self) -> list[tuple[str, list[int]]]:
        """Of each layer its label, and the numbers of its heads."""
        return [(layer["label"], [head["number"] for head in layer["heads"]]) for layer in self._layers]

    def parts(self) -> Iterator[str]:
        """The page, in parts. Raises an `UnsupportedError` where every call was left out."""
        if not self._layers:
            raise nothing_left(self._left_out)
        inside, outside = style("report"), style("outside")
        guard, load, script = program("guard"), program("load"), program_with_markup("report")
        yield from filled_parts(
            source(__package__, "page.html"),
            {
                "policy": policy((outside, inside), guard, load, script, worker=True),
                "title": html.escape(self.title),
                "outside": outside,
                "guard": guard,
                "meta": embedded(self.meta()),
                "thumbnails": self._blocks.html(early=True, first=()),
                "program": base64.b64encode(zlib.compress(script.encode(), 9)).decode("ascii"),
                "load": load,
                "data": self._blocks.html(early=False, first=self._opening()),
            },
        )

    def size(self) -> int:
        """The bytes of the file."""
        return sum(len(part.encode("utf-8", "replace")) for part in self.parts())

    def write(self, path: Any) -> Path:
        """Write the file; one that is there stays as it was until all is written."""
        return write_parts(path, self.parts())

    def _opening(self) -> list[int]:
        """The blocks of the head that the page opens on, operands last: it is shown while others are being read."""
        place = self.distinctive or {"layer": 0, "head": 0}
        layer = self._layers[place["layer"]]
        parts = layer["shared"] | layer["heads"][place["head"]]
        operands = {name: parts.pop(name) for name in ("query", "key") if name in parts}
        return list(dict.fromkeys([*_blocks_in(parts), *_blocks_in(operands)]))

    @property
    def blocks(self) -> int:
        """How many there are."""
        return len(self._blocks)

    def block(self, number: int) -> bytes:
        """Block `number`, deflated."""
        return self._blocks[number]

    def meta(self) -> dict[str, Any]:
        """What is described above."""
        known = list(dict.fromkeys(measure for heads in self._measures for head in heads for measure in head))
        layers = []
        for layer, each in zip(self._layers, self._measures, strict=True):
            heads = [head | {"measures": measured(of, known)} for head, of in zip(layer["heads"], each, strict=True)]
            layers.append(layer | {"heads": heads})
        about = ("name", "says", "formula", "range", "does")
        return {
            "title": self.title,
            "texts": self._texts.all,
            "originals": self._originals,
            "steps": self._steps.all,
            "measures": [{name: getattr(measure, name) for name in about} for measure in known],
            "distinctive": self.distinctive,
            "leftOut": [call._asdict() for call in self._left_out],
            "beside": self.beside,
            "aligned": [{"texts": texts, "positions": lists} for texts, lists in self._aligned.items()],
            "layers": layers,
        }


def program_with_markup(name: str) -> str:
    """A program that shows a report, after the content of a report's element, `MARKUP`."""
    text = filled(source(__package__, "report.html"), {"style": style("report"), "heads": heads_pane()})
    return "\n".join([STRICT, f"const MARKUP = {json.dumps(text)};", program(name)])


def heads_pane() -> str:
    """The content of the pane of heads, which the page of a survey has too."""
    return source(__package__, "heads_pane.html").rstrip("\n")


def _blocks_in(parts: Mapping[str, Any]) -> Iterator[int]:
    """The numbers of the blocks in which the arrays of a head stand."""
    for name, value in parts.items():
        if isinstance(value, Mapping):
            yield from _blocks_in(value)
        elif name not in NO_PLACES and value is not None:
            yield from (place // PLACES for place in (value if isinstance(value, list) else [value]))


def nothing_left(left_out: Iterable[Any]) -> UnsupportedError:
    """What a page raises whose every call is left out."""
    said = " ".join(f"{call.name}: {call.reason}" for call in left_out)
    return UnsupportedError(f"{said} Look at call.weights.")


def page_of(layers: Iterable[Layer | LeftOut], title: str) -> Page:
    """The page of these layers, which are taken one at a time."""
    page = Page(title)
    for layer in layers:
        page.add(layer)
    if not page._layers and not page._left_out:
        raise ValueError("a page needs at least one layer; there is none.")
    return page


def render(layers: Iterable[Layer | LeftOut], title: str) -> str:
    """The whole page as a string: write it to a file as UTF-8 and open that.

    Args:
        layers: the attention calls to show, in the order they were made. They may differ in kind,
            length and number of heads.
        title: what the page is called.

    Raises:
        ValueError: if there is no layer to show.
    """
    text = "".join(page_of(layers, title).parts())
    return text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be written


def write_report(path: Any, layers: Iterable[Layer | LeftOut], title: str) -> Path:
    """Write the page of these layers, which are taken one at a time; no string of the whole page is made."""
    return page_of(layers, title).write(path)


class _Once:
    """Lists, each content once: most layers of a model read the same text, and compute alike."""

    def __init__(self) -> None:
        self.all: list[list[Any]] = []
        self._numbers: dict[str, int] = {}

    def add(self, content: list[Any]) -> int:
        number = self._numbers.setdefault(repr(content), len(self.all))
        if number == len(self.all):
            self.all.append(content)
        return number


def widget_module() -> str:
    """An ES module as `anywidget` takes it: its `render` shows the model's `meta`, and asks it for blocks.

    The model is asked `{"block": number}` and answers the same with the bytes of `Page.block`, or `{"error": text}`
    too. Its `address` is what a link to a page holds: what is chosen, changed from both sides. `height` is that of the
    box in pixels.
    """
    return program_with_markup("widget")
