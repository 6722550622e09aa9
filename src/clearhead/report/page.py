"""Writes the report: one HTML file with its data, its style and its program inside.

The page needs no network and runs only its own scripts: a policy in its head names them by hash. Names and tokens of
the model are data in a JSON block, and reach the page as text. See `front/` for the program, one
concern a file; `packaging/bundle.mjs` makes one script of them, which stands there deflated; `load.js` unpacks it.

**The data** are `meta`, JSON, and blocks, see `_blocks.py`. The place of an array is a number, 8 · block + place in the
block; a list of such numbers is one array in several parts. `front/data.js` reads them: `new Run(source)`, of a page or
of messages.

`meta`:
  title; texts: lists of tokens; originals: {text: {token: spelling}} of words that the tokenizer does not know;
  steps: lists of {name, formula, tree}, as `base/front/language.js` says it, null where the step is given;
  measures: [{name, says, formula, range, does, alone}], the measures that some head has; alone: it has no value of
    uniform attention;
  distinctive: {layer, head, sentence, measure, nearUniform}, layer and head by their places in this page, or null;
  opens: {layer, head}, in the same way, the head on which the page opens, or null: that of distinctive, else the first;
  leftOut: [{name, reason}], calls that are not shown;
  beside: [[layer, layer], …], the calls with the same number in two recordings, by their places in this page;
  aligned: [{texts: [text, text], positions: [[…], […]]}, …], the positions of two texts that correspond, ascending;
    other texts of one length correspond position by position;
  flows: [[layer, …], …], the places of layers that read each other's results in one run, all of them, for rollout;
  image: {place, width, height, rows, columns, extra}: a picture in bytes, its patches, and the tokens before; or null;
  layers: [{name, label, kind, role, queryText, keyText, queries, keys, position, answer, begins, phi, features, pairs,
    scale, softcap, error, why, whyBlind, thumbnail, shared, heads}].
    position: the position of query 0 among the keys, or null. answer: the first query that the model generated, or
    null. begins: the first query of each step of a generation, or []. phi: null where scores are given. pairs:
    [feature, feature, positions in a turn or null], for rotary positions. thumbnail: {block, rows, columns}: the place
    of the bytes of all heads, each rows × columns: see `_blocks.py`. heads: [{number, query, key, scores, start, …,
    sink, measures, pyramid}]; shared: the entries that all heads share.

The entries of a head:
  query (queries, features), key (keys, features); weight (features), where φ's terms are weighted; or scores;
  start, stop (queries): the keys that a query may see; counts (queries): their number; expected (keys): the weight that
    each key would receive from uniform attention under the same mask;
  relative (queries + keys − 1), dense {rows, columns, values}, tiles {side, places, values}: the bias of the scores;
  holes {side, places, values}: bits, 1 for pairs inside the spans that the mask hides;
  valueNorms (keys): the length of each value vector, where values were kept; transformedNorms (keys): of what the head
    writes for it, where the layer that writes the heads is known;
  slopes: {grad (queries, features), value (keys, features), raises (keys), lowers (keys), features}: see `Slopes`;
  logsumexp, entropy, received, distance: left out where `rowsOf` in `weights.js` computes them at once;
  sink: the score of the sink;
  measures: [[value, of uniform attention, key or null, queries], …] in the order of meta.measures, 0 where there is
    none, the last ones left out where they are not known;
  pyramid: {max, mean, rows, columns, perRow, perColumn}, of sides longer than 1,024: see `_blocks.py`.
Where a sink has a share of the softmax, entropy, received and distance are of the weights divided by their sum.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clearhead.base.errors import UnsupportedError
from clearhead.base.output.pages import bundled, embedded, filled, filled_parts, head, source, write_page
from clearhead.report._blocks import PLACES, Blocks, plain
from clearhead.report.describe import described, measured
from clearhead.report.layer import Array, Layer, LeftOut, Measures

# Entries of a head that are no places of arrays.
NO_PLACES = ("number", "sink", "rows", "columns", "perRow", "perColumn", "side", "features")

Positions = tuple[Sequence[int], Sequence[int]]


class Page:
    """A page that is made a layer at a time. Added layers are kept compressed in a temporary file."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.distinctive: Mapping[str, Any] | None = None
        self.opens: dict[str, int] | None = None
        self.beside: list[tuple[int, int]] = []
        self.flows: list[list[int]] = []
        self._image: dict[str, int] | None = None
        self._originals: dict[int, Mapping[int, str]] = {}
        self._aligned: dict[tuple[int, int], Positions] = {}
        self.blocks, self._texts, self._steps = Blocks(), _Once(), _Once()
        self._layers: list[dict[str, Any]] = []
        self._measures: list[Sequence[Measures]] = []
        self._left_out: list[LeftOut] = []

    def add(self, layer: Layer | LeftOut) -> None:
        """Add a layer after the others, or note that a call is left out."""
        if isinstance(layer, LeftOut):
            self._left_out.append(layer)
            return
        texts = [self._texts.add([str(token) for token in side]) for side in (layer.query_tokens, layer.key_tokens)]
        steps = [self._steps.add(list(each)) for each in (layer.steps, layer.blind_steps)]
        meta = described(layer, (texts[0], texts[1]), (steps[0], steps[1]), self.blocks)
        own = layer.label or f"L{len(self._layers)}"
        taken = {other["label"] for other in self._layers}
        labels = (own, *(f"{own}#{number}" for number in range(2, len(taken) + 2)))
        meta["label"] = next(label for label in labels if label not in taken)
        self._layers.append(meta)
        self._measures.append(layer.measures or [{}] * layer.heads)

    def spell(self, tokens: Sequence[str], originals: Mapping[int, str]) -> None:
        """Add the spelling of tokens of a text that the tokenizer does not know, by their places."""
        self._originals[self._texts.add([str(token) for token in tokens])] = originals

    def show(self, pixels: Array, rows: int, columns: int, extra: int) -> None:
        """Add a picture, uint8 (height, width, 3), whose patches are the tokens after the first `extra` ones."""
        sizes = {"height": pixels.shape[0], "width": pixels.shape[1], "rows": rows, "columns": columns, "extra": extra}
        self._image = sizes | {"place": self.blocks.one(plain(pixels, "uint8"))}

    def align(self, tokens: Sequence[str], other_tokens: Sequence[str], positions: Positions) -> None:
        """Add the positions of two texts that correspond."""
        one, other = (self._texts.add([str(token) for token in side]) for side in (tokens, other_tokens))
        self._aligned[one, other] = positions

    def open_on(self, label: str, head: int) -> None:
        """Open on the head with this number of the layer with this label."""
        places = [(place, own) for place, (name, own) in enumerate(self.shown) if name == label]
        if not places:
            raise UnsupportedError(f"the page cannot open on {label}, which is not shown. {_reasons(self._left_out)}")
        (place, own), *_ = places
        self.opens = {"layer": place, "head": own.index(head)}

    @property
    def shown(self) -> list[tuple[str, list[int]]]:
        """The label of each layer, and the numbers of its heads."""
        return [(layer["label"], [head["number"] for head in layer["heads"]]) for layer in self._layers]

    def parts(self) -> Iterator[str]:
        """The page, in parts. Raises an `UnsupportedError` where every call was left out."""
        if not self._layers:
            raise nothing_left(self._left_out)
        does, styles = "This report computes and draws attention", (bundled("outside.css"), bundled("report.css"))
        load, script = bundled("load.js"), program_with_markup("report")
        yield from filled_parts(
            source(__package__, "page.html"),
            {
                "head": head(self.title, does, styles, load, script, worker=True),
                "meta": embedded(self.meta()),
                "thumbnails": self.blocks.html(early=True, first=()),
                "program": base64.b64encode(zlib.compress(script.encode(), 9)).decode("ascii"),
                "load": load,
                "data": self.blocks.html(early=False, first=self._opening()),
            },
        )

    def size(self) -> int:
        """The bytes of the file."""
        return sum(len(part.encode("utf-8", "replace")) for part in self.parts())

    def write(self, path: Any) -> Path:
        """Write the file. An existing file stays unchanged until all is written."""
        return write_page(path, self.parts())

    def _opening(self) -> list[int]:
        """The blocks of the head that the page opens on, operands last. It is shown while others are being read."""
        place = self.opens or self.distinctive or {"layer": 0, "head": 0}
        layer = self._layers[place["layer"]]
        parts = layer["shared"] | layer["heads"][place["head"]]
        operands = {name: parts.pop(name) for name in ("query", "key", "slopes") if name in parts}
        return list(dict.fromkeys([*_blocks_in(parts), *_blocks_in(operands)]))

    def meta(self) -> dict[str, Any]:
        """The metadata that the module's text describes."""
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
            "measures": [
                {name: getattr(measure, name) for name in about} | {"alone": getattr(measure, "alone", False)}
                for measure in known
            ],
            "distinctive": self.distinctive,
            "opens": self.opens,
            "leftOut": [call._asdict() for call in self._left_out],
            "beside": self.beside,
            "flows": self.flows,
            "image": self._image,
            "aligned": [{"texts": texts, "positions": lists} for texts, lists in self._aligned.items()],
            "layers": layers,
        }


def program_with_markup(name: str) -> str:
    """A program that shows a report, after the content of a report's element, `MARKUP`."""
    text = filled(source(__package__, "report.html"), {"style": bundled("report.css"), "heads": heads_pane()})
    return "\n".join(['"use strict";', f"const MARKUP = {json.dumps(text)};", bundled(f"{name}.js")])


def heads_pane() -> str:
    """The content of the pane of heads, which is also on the page of a survey."""
    return source(__package__, "heads_pane.html").rstrip("\n")


def _blocks_in(parts: Mapping[str, Any]) -> Iterator[int]:
    """The numbers of the blocks in which the arrays of a head stand."""
    for name, value in parts.items():
        if isinstance(value, Mapping):
            yield from _blocks_in(value)
        elif name not in NO_PLACES and value is not None:
            yield from (place // PLACES for place in (value if isinstance(value, list) else [value]))


def nothing_left(left_out: Iterable[Any]) -> UnsupportedError:
    """The error of a page whose every call is left out."""
    return UnsupportedError(f"{_reasons(left_out)} Look at call.weights.")


def _reasons(left_out: Iterable[Any]) -> str:
    return " ".join(f"{call.name}: {call.reason}" for call in left_out)


class _Once:
    """Lists, of which equal ones are kept once: most layers of a model read the same text, and have the same steps."""

    def __init__(self) -> None:
        self.all: list[list[Any]] = []
        self._numbers: dict[str, int] = {}

    def add(self, content: list[Any]) -> int:
        number = self._numbers.setdefault(repr(content), len(self.all))
        if number == len(self.all):
            self.all.append(content)
        return number


def widget_module() -> str:
    """An ES module as `anywidget` takes it. Its `render` shows the model's `meta`, and asks the model for blocks.

    A request is `{"block": number}`. The answer is the same message with the bytes of that block of `Page.blocks`, or
    with `{"error": text}` added. The model's `address` holds the choices on the page, as a link to it does; both sides
    change it. `height` is the height of the box in pixels.
    """
    return program_with_markup("widget")
