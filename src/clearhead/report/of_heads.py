"""Some heads of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from clearhead.report.layer import Array, Bias, Layer


def of_heads(layer: Layer, heads: Sequence[int]) -> Layer:
    """The layer with these of its heads alone: they keep their numbers, and the name says which they are."""
    chosen = list(heads)

    def some(array: Array | None) -> Any:
        """Of an array of all heads, or of one that stands for all."""
        return array if array is None or len(array) == 1 != layer.heads else array[chosen]

    def each(parts: tuple[Any, ...]) -> tuple[Any, ...]:
        return parts if len(parts) <= 1 != layer.heads else tuple(parts[head] for head in chosen)

    keys, steps, bias, pyramid = [layer.key_head(h) for h in chosen], layer.operand_steps, layer.bias, layer.pyramid
    numbers = layer.numbers or tuple(range(layer.heads))
    return replace(
        layer,
        name=f"{layer.name} (head{'s' * (len(chosen) > 1)} {', '.join(map(str, chosen))})",
        query=some(layer.query),
        key=layer.key[keys],
        scores=some(layer.scores),
        start=some(layer.start),
        stop=some(layer.stop),
        bias=None if bias is None else Bias(some(bias.relative), some(bias.dense), each(bias.tiles)),
        holes=each(layer.holes),
        logsumexp=some(layer.logsumexp),
        entropy=some(layer.entropy),
        received=some(layer.received),
        distance=some(layer.distance),
        thumbnail=some(layer.thumbnail),
        sinks=some(layer.sinks),
        values=some(layer.values),
        seen=some(layer.seen),
        operand_steps=None if steps is None else (some(steps[0]), steps[1][keys]),
        numbers=tuple(numbers[head] for head in chosen),
        measures=None if layer.measures is None else tuple(layer.measures[head] for head in chosen),
        pyramid=None if pyramid is None else replace(pyramid, max=some(pyramid.max), mean=some(pyramid.mean)),
    )
