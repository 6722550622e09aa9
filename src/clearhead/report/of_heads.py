"""Some heads of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clearhead.report.layer import Array, Layer


def of_heads(layer: Layer, heads: Sequence[int]) -> Layer:
    """The layer with these of its heads alone. Its name says which they were, since the page counts from 0."""
    chosen = list(heads)

    def some(array: Array) -> Array:
        """Of an array of all heads, or of one that stands for all."""
        found: Array = array if len(array) == 1 != layer.heads else array[chosen]
        return found

    keys, steps = [layer.key_head(head) for head in chosen], layer.operand_steps
    return replace(
        layer,
        name=f"{layer.name} (head{'s' * (len(chosen) > 1)} {', '.join(map(str, chosen))})",
        query=some(layer.query),
        key=layer.key[keys],
        start=some(layer.start),
        stop=some(layer.stop),
        bias=None if layer.bias is None else some(layer.bias),
        logsumexp=some(layer.logsumexp),
        entropy=some(layer.entropy),
        received=some(layer.received),
        distance=None if layer.distance is None else some(layer.distance),
        thumbnail=some(layer.thumbnail),
        sinks=None if layer.sinks is None else some(layer.sinks),
        operand_steps=None if steps is None else (some(steps[0]), steps[1][keys]),
    )
