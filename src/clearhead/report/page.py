"""Writes the report: one HTML file with its data, its style and its program inside.

The page needs no network and runs nothing but its own two scripts: a policy in its head names them
by hash. What comes from the model (names, tokens) is data in a JSON block, and reaches the page as
text. See `front/` for the program, one concern a file; they are joined here, in the order of
`SCRIPTS`, into one function.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from clearhead.base.pages import ARITHMETIC, embedded, filled, module_of, policy, program_of, source
from clearhead.inspection.measures import MEASURES
from clearhead.report._blocks import Blocks
from clearhead.report.layer import Array, Layer, of_head

SCRIPTS = (
    "data.js",
    "weights.js",
    "words.js",
    "keys.js",
    "theme.js",
    "colour.js",
    "view.js",
    "signed.js",
    "measures.js",
    "preview.js",
    "heads_matrix.js",
    "heads_list.js",
    "heads_top.js",
    "pins.js",
    "heads.js",
    "header.js",
    "text.js",
    "layout.js",
    "marks.js",
    "legend.js",
    "map.js",
    "difference.js",
    "compare.js",
    "why.js",
    "pair.js",
    "mount.js",
    "main.js",
)

# The style of the page: a file for each pane, after what all share.
STYLES = ("page.css", "heads.css", "text.css", "map.css", "compare.css", "pair.css")

# What the page uses of the program that computes the steps of an explanation from their code.
STEPS = ("read", "nodeOf", "leaf", "number", "everyIndex", "placeOf", "sizeOf", "plainText", "setMostTerms")

# A thumbnail's weights travel as one byte: 0 is zero, 1 to 255 are 1e-6 to 1 on a log scale.
THUMBNAIL_DECADES = 6


def render(layers: Sequence[Layer], title: str, distinctive: Any = None) -> str:
    """The whole page as a string: write it to a file as UTF-8 and open that.

    Args:
        layers: the attention calls to show, in the order they were made. They may differ in kind,
            length and number of heads.
        title: what the page is called.

    Raises:
        ValueError: if there is no layer to show.
    """
    if not layers:
        raise ValueError("render() needs at least one layer; the list is empty.")
    blocks, texts, steps = Blocks(), _Once(), _Once()
    thumbnails = [blocks.add(_thumbnail_codes(layer.thumbnail * layer.key.shape[1]), "uint8") for layer in layers]
    early = len(blocks)  # the overview is drawn from these, before the rest has been read
    described = [
        _describe(layer, thumbnail, blocks, texts, steps) for layer, thumbnail in zip(layers, thumbnails, strict=True)
    ]
    meta = {"title": title, "texts": texts.all, "steps": steps.all, "layers": described, "types": blocks.types}
    meta["measures"] = [{k: getattr(m, k) for k in ("name", "says", "formula", "range", "does")} for m in MEASURES]
    meta["distinctive"] = distinctive
    style = "".join(source(__package__, name) for name in STYLES)
    outside = source(__package__, "outside.css")
    guard = source("clearhead.base", "guard.js")
    arithmetic = module_of("steps", STEPS, *(source("clearhead.base", name) for name in ARITHMETIC))
    program = program_of(
        source("clearhead.base", "ramp.js"), arithmetic, *(source(__package__, name) for name in SCRIPTS)
    )
    parts = {
        "policy": policy((outside, style), guard, program),
        "title": html.escape(title),
        "outside": outside,
        "style": style,
        "guard": guard,
        "meta": embedded(meta),
        "thumbnails": blocks.html(0, early),
        "program": program,
        "data": blocks.html(early, len(blocks)),
    }
    return filled(source(__package__, "page.html"), parts)


def _describe(layer: Layer, thumbnail: int, blocks: Blocks, texts: _Once, why: _Once) -> dict[str, Any]:
    """The part of the page's metadata that is about one layer; its arrays go to `blocks`."""
    keys = layer.key.shape[1]
    heads = []
    steps = layer.operand_steps
    for h in range(layer.heads):
        bias, distance, k = layer.bias, layer.distance, layer.key_head(h)
        heads.append(
            {
                "query": _operand(blocks, layer.query[h], None if steps is None else steps[0][h]),
                "key": _operand(blocks, layer.key[k], None if steps is None else steps[1][k]),
                "start": blocks.add(np.clip(of_head(layer.start, h), 0, keys), "int32"),
                "stop": blocks.add(np.clip(of_head(layer.stop, h), 0, keys), "int32"),
                "bias": None if bias is None else blocks.add(of_head(bias, h), "float32"),
                "logsumexp": blocks.add(layer.logsumexp[h], layer.logsumexp.dtype.name),
                "received": blocks.add_rounded(layer.received[h]),
                "distance": None if distance is None else blocks.add_rounded(distance[h]),
                "sink": None if layer.sinks is None else float(layer.sinks[h]),
                "mean": _means(layer, h),
                "number": h,
                "measures": {k: [None if x != x else x for x in v] for k, v in layer.measures[h].items()} if layer.measures else {},
            }
        )
    return {
        "name": layer.name,
        "kind": layer.kind,
        "label": layer.label or None,
        "role": layer.role or None,
        "queryText": texts.add([str(token) for token in layer.query_tokens]),
        "keyText": texts.add([str(token) for token in layer.key_tokens]),
        "queries": layer.query.shape[1],
        "keys": keys,
        "features": layer.query.shape[2],
        "scale": float(layer.scale),
        "softcap": None if layer.softcap is None else float(layer.softcap),
        "error": layer.error,
        "why": why.add(list(layer.steps)),
        "whyBlind": why.add(list(layer.blind_steps)),
        "thumbnail": {
            "block": thumbnail,
            "rows": layer.thumbnail.shape[1],
            "columns": layer.thumbnail.shape[2],
            "decades": THUMBNAIL_DECADES,
        },
        "heads": heads,
    }


def _operand(blocks: Blocks, array: Array, steps: Array | None) -> int:
    return blocks.add(array, "float32") if steps is None else blocks.add_multiples(array, steps)


def _means(layer: Layer, head: int) -> dict[str, float | None]:
    """What the overview says of a head, over the queries that see something."""
    seeing = np.asarray(layer.logsumexp[head]) != -np.inf
    received = np.asarray(layer.received[head], dtype=np.float64)
    if not seeing.any():
        return {"entropy": None, "sink": None, "sinkKey": None, "distance": None}
    sink_key = int(received.argmax())
    distance = layer.distance
    return {
        "entropy": _finite(layer.entropy[head][seeing].mean()),
        "sink": _finite(received[sink_key] / seeing.sum()),
        "sinkKey": sink_key,
        "distance": None if distance is None else _finite(distance[head][seeing].mean()),
    }


def _finite(value: Any) -> float | None:
    """JSON has no NaN and no infinity: None, which the page shows as unknown."""
    return float(value) if np.isfinite(value) else None


def _thumbnail_codes(weights: Array) -> Array:
    """Weights as bytes on a log scale; 0 stays 0, what is below the scale becomes 1."""
    with np.errstate(divide="ignore"):
        octaves = np.log2(weights)
    codes = 128 + np.rint(127 * np.clip(np.nan_to_num(octaves, neginf=-8), -8, 8) / 8)
    return np.where(weights <= 0, 0, codes).astype(np.uint8)


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
