"""Writes the report: one HTML file with its data, its style and its program inside.

The page needs no network and runs nothing but its own two scripts: a policy in its head names them
by hash. What comes from the model (names, tokens) is data in a JSON block, and reaches the page as
text. See `front/` for the program, one concern a file; they are joined here, in the order of
`SCRIPTS`, into one function.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from clearhead.report._blocks import Blocks
from clearhead.report.layer import Array, Layer, of_head

SCRIPTS = (
    "data.js",
    "weights.js",
    "text.js",
    "colour.js",
    "overview.js",
    "prose.js",
    "layout.js",
    "map.js",
    "hover.js",
    "legend.js",
    "detail.js",
    "main.js",
)

# A thumbnail's weights travel as one byte: 0 is zero, 1 to 255 are 1e-6 to 1 on a log scale.
THUMBNAIL_DECADES = 6


def render(layers: Sequence[Layer], title: str) -> str:
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
    blocks, texts = Blocks(), _Texts()
    thumbnails = [blocks.add(_thumbnail_codes(layer.thumbnail), "uint8") for layer in layers]
    early = len(blocks)  # the overview is drawn from these, before the rest has been read
    described = [
        _describe(layer, thumbnail, blocks, texts) for layer, thumbnail in zip(layers, thumbnails, strict=True)
    ]
    meta = {"title": title, "texts": texts.all, "layers": described, "types": blocks.types}
    style = _source("page.css")
    guard = _source("guard.js")
    program = "".join(_source(name) for name in SCRIPTS)
    program = f'(() => {{\n"use strict";\n{program}}})();\n'
    parts = {
        "policy": _policy(style, guard, program),
        "title": html.escape(title),
        "style": style,
        "guard": guard,
        "meta": _json(meta),
        "thumbnails": blocks.html(0, early),
        "program": program,
        "data": blocks.html(early, len(blocks)),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _source("page.html"))
    return page.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be written


def _describe(layer: Layer, thumbnail: int, blocks: Blocks, texts: _Texts) -> dict[str, Any]:
    """The part of the page's metadata that is about one layer; its arrays go to `blocks`."""
    keys = layer.key.shape[1]
    heads = []
    for h in range(layer.heads):
        bias, distance = layer.bias, layer.distance
        heads.append(
            {
                "query": blocks.add(layer.query[h], "float32"),
                "key": blocks.add(layer.key[layer.key_head(h)], "float32"),
                "start": blocks.add(np.clip(of_head(layer.start, h), 0, keys), "int32"),
                "stop": blocks.add(np.clip(of_head(layer.stop, h), 0, keys), "int32"),
                "bias": None if bias is None else blocks.add(of_head(bias, h), "float32"),
                "logsumexp": blocks.add(layer.logsumexp[h], "float64"),
                "entropy": blocks.add(layer.entropy[h], "float32"),
                "received": blocks.add(layer.received[h], "float32"),
                "distance": None if distance is None else blocks.add(distance[h], "float32"),
                "mean": _means(layer, h),
            }
        )
    return {
        "name": layer.name,
        "kind": layer.kind,
        "queryText": texts.add(layer.query_tokens),
        "keyText": texts.add(layer.key_tokens),
        "queries": layer.query.shape[1],
        "keys": keys,
        "features": layer.query.shape[2],
        "scale": float(layer.scale),
        "softcap": None if layer.softcap is None else float(layer.softcap),
        "thumbnail": {
            "block": thumbnail,
            "rows": layer.thumbnail.shape[1],
            "columns": layer.thumbnail.shape[2],
            "decades": THUMBNAIL_DECADES,
        },
        "heads": heads,
    }


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
    weights = np.nan_to_num(np.asarray(weights, dtype=np.float64), nan=1.0)
    with np.errstate(divide="ignore"):
        share = 1 + np.log10(weights) / THUMBNAIL_DECADES
    codes = 1 + np.rint(254 * np.clip(share, 0, 1))
    return np.where(weights > 0, codes, 0).astype(np.uint8)


class _Texts:
    """Token lists, each content once: most layers of a model read the same text."""

    def __init__(self) -> None:
        self.all: list[list[str]] = []
        self._numbers: dict[tuple[str, ...], int] = {}

    def add(self, tokens: Sequence[str]) -> int:
        content = tuple(str(token) for token in tokens)
        if content not in self._numbers:
            self._numbers[content] = len(self.all)
            self.all.append(list(content))
        return self._numbers[content]


def _json(value: Any) -> str:
    """JSON that cannot end the element it stands in, whatever the strings hold."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _policy(style: str, *scripts: str) -> str:
    """The content security policy: our own scripts and style by hash, and nothing else."""
    allowed = " ".join(_hash(script) for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _hash(source: str) -> str:
    digest = hashlib.sha256(source.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _source(name: str) -> str:
    """A file of the front end, with the line ends that a browser hashes."""
    text = files("clearhead.report").joinpath("front", name).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n")
