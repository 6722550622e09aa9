"""The metadata of a layer in a page. The arrays of the layer are added to blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from clearhead.report._blocks import Blocks, multiples, plain, planes, thumbnail_codes
from clearhead.report.layer import Array, Layer, Measures, Pyramid, Slopes, Tiles, seen_keys

CHUNK = 8192  # tokens of an operand in a block
AT_ONCE = 2**24  # up to so many products of features, the page computes log-sum-exps itself


def described(layer: Layer, texts: tuple[int, int], steps: tuple[int, int], blocks: Blocks) -> dict[str, Any]:
    """The metadata of a layer: see `page.py`. `texts`, `steps`: the numbers of its texts, and of its steps."""
    queries, keys = layer.shape
    thumbnail = blocks.add(plain(thumbnail_codes(layer.thumbnail), "uint8"), early=True)[0]
    counts, expected = seen_keys(layer)
    shared: dict[str, Any] = {}
    heads: list[dict[str, Any]] = [{"number": n} for n in layer.numbers or range(layer.heads)]

    def put(name: str, parts: Sequence[Any]) -> None:
        """Store a value of each head, or one for all heads."""
        if len(parts) == 1:
            shared[name] = parts[0]
        for head, part in zip(heads, parts if len(parts) > 1 else (), strict=False):
            head[name] = part

    for name, edge in (("start", layer.start), ("stop", layer.stop)):
        put(name, _each(np.clip(edge, 0, keys), "int32", blocks))
    put("counts", _each(counts, "int32", blocks))
    put("expected", _each(expected, "float32", blocks))
    if layer.weight is not None:
        put("weight", [blocks.one(plain(layer.weight, "float64"))])
    if layer.bias is not None:
        bias = layer.bias
        if bias.relative is not None:
            put("relative", _each(bias.relative, "float32", blocks))
        if bias.dense is not None:
            rows, columns = bias.dense.shape[1:]
            places = _each(bias.dense, "float32", blocks)
            put("dense", [{"rows": rows, "columns": columns, "values": place} for place in places])
        put("tiles", [_tiles(tiles, blocks) for tiles in bias.tiles])
    for name, norms in (("valueNorms", layer.value_norms), ("transformedNorms", layer.transformed_norms)):
        put(name, [] if norms is None else _each(norms, "float32", blocks))
    put("holes", [_tiles(tiles, blocks) for tiles in layer.holes])
    for number, head in enumerate(heads):
        head |= _operands(layer, number, blocks) | _rows(layer, number, blocks)
        if layer.sinks is not None:
            head["sink"] = float(layer.sinks[number])
        if layer.pyramid is not None:
            head["pyramid"] = _pyramid(layer.pyramid, number, blocks)
        if layer.slopes is not None:
            head["slopes"] = _slopes(layer.slopes, number, layer.heads, blocks)
    return {name: getattr(layer, name) for name in ("name", "label", "kind", "role", "position", "answer", "error")} | {
        "queryText": texts[0],
        "keyText": texts[1],
        "queries": queries,
        "keys": keys,
        "begins": list(layer.begins),
        "phi": None if layer.scores is not None else layer.phi,
        "features": layer.query.shape[2],
        "pairs": [[one, other, None if turn is None else finite(turn)] for one, other, turn in layer.pairs],
        "scale": float(layer.scale),
        "softcap": None if layer.softcap is None else float(layer.softcap),
        "why": steps[0],
        "whyBlind": steps[1],
        "thumbnail": {"block": thumbnail, "rows": layer.thumbnail.shape[1], "columns": layer.thumbnail.shape[2]},
        "shared": shared,
        "heads": heads,
    }


def _each(rows: Array, kind: str, blocks: Blocks) -> list[int]:
    """The place of each row's numbers, in a block of its own."""
    return [blocks.one(plain(row, kind)) for row in rows]


def _operands(layer: Layer, number: int, blocks: Blocks) -> dict[str, Any]:
    """Query and key: in one block for a short head with a key of its own, else in blocks of 8,192 tokens."""
    if layer.scores is not None:
        seen = layer.allowed(number, 0, layer.shape[0])  # at most 1,024 × 1,024
        return {"scores": blocks.one(plain(np.where(seen, layer.scores[number], 0.0), "float32"))}
    key_head, steps = layer.key_head(number), layer.operand_steps
    query = _packed(layer.query[number], None if steps is None else steps[0][number])
    key = _packed(layer.key[key_head], None if steps is None else steps[1][key_head])
    if len(query) == len(key) == 1 and len(layer.key) == layer.heads:
        together = blocks.add(*query, *key)
        return {"query": together[0], "key": together[1]}
    return {"query": [blocks.one(part) for part in query], "key": [blocks.one(part) for part in key]}


def _packed(operand: Array, steps: Array | None) -> list[bytes]:
    parts = (operand[first : first + CHUNK] for first in range(0, len(operand), CHUNK))
    return [plain(part, "float32") if steps is None else multiples(part, steps) for part in parts]


def _rows(layer: Layer, number: int, blocks: Blocks) -> dict[str, int]:
    """The numbers of each query and key; nothing where the page computes them at once."""
    from clearhead.scores.pair_functions import PHIS  # here, since a page is written without torch

    queries, keys = layer.shape
    if layer.alone and queries * keys * max(layer.query.shape[2], 1) * PHIS[layer.phi].page_cost <= AT_ONCE:
        return {}
    found = {
        "logsumexp": plain(layer.logsumexp[number], layer.logsumexp.dtype.name),
        "entropy": plain(layer.entropy[number], "float32"),
        "received": plain(layer.received[number], "float32"),
    }
    if layer.distance is not None:
        found["distance"] = plain(layer.distance[number], "float32")
    return dict(zip(found, blocks.add(*found.values()), strict=True))


def _tiles(tiles: Tiles | None, blocks: Blocks) -> dict[str, Any] | None:
    """The places of the tiles' numbers and of the tiles, as float32, or as bits from the highest bit of a byte on."""
    if tiles is None:
        return None
    values, places = tiles.tiles, plain(tiles.places, "int32")
    bits = values.dtype == np.bool_
    packed = plain(np.packbits(values.ravel()), "uint8") if bits else plain(values, "float32")
    return {"side": values.shape[-1], "places": blocks.one(places), "values": blocks.one(packed)}


def _slopes(slopes: Slopes, number: int, heads: int, blocks: Blocks) -> dict[str, Any]:
    """The places of the gradient of the output, of the values, and of the sums over the queries."""
    own, steps = number // (heads // len(slopes.value)), slopes.steps
    sides = ("grad", slopes.grad[number], 0, number), ("value", slopes.value[own], 1, own)
    places: dict[str, Any] = {"features": slopes.grad.shape[-1]}
    for name, array, side, row in sides:
        parts = _packed(array, None if steps is None else steps[side][row])
        places[name] = [blocks.one(part) for part in parts]
    sums = blocks.add(*(plain(each[number], "float32") for each in (slopes.raises, slopes.lowers)))
    return places | dict(zip(("raises", "lowers"), sums, strict=True))


def _pyramid(pyramid: Pyramid, number: int, blocks: Blocks) -> dict[str, int]:
    largest, mean = blocks.add(planes(pyramid.max[number]), planes(pyramid.mean[number]))
    rows, columns = pyramid.max[number].shape
    sizes = {"rows": rows, "columns": columns, "perRow": pyramid.per_row, "perColumn": pyramid.per_column}
    return {"max": largest, "mean": mean} | sizes


def measured(measures: Measures, known: Sequence[Any]) -> list[Any]:
    """A head's measures in the given order: value, uniform attention's value, key, queries; or 0 for none."""
    found: list[Any] = []
    for measure in known:
        value, uniform, *more = measures.get(measure, (None, None))
        numbers = [None if number is None else finite(number) for number in (value, uniform)]
        while more and more[-1] is None:
            more.pop()
        found.append(0 if numbers == [None, None] else numbers + more)
    return found


def finite(value: Any) -> float | None:
    """The number to five digits; None, which the page shows as unknown, for NaN and ±∞, which JSON does not have."""
    return float(f"{value:.5g}") if np.isfinite(value) else None
