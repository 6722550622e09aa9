"""The report in a few figures a layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clearhead.report.layer import Layer


@dataclass(frozen=True)
class LayerSummary:
    """One call in figures: means over the queries that see something."""

    name: str
    kind: str
    focused: tuple[int, float]  # the head of the least mean entropy, and that entropy in nats
    diffuse: tuple[int, float]  # the head of the most
    sink: tuple[str, int, float]  # the key that gets the most attention over all heads: its word, place and share
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
    return LayerSummary(
        name=layer.name,
        kind=layer.kind,
        focused=(low, float(entropy[low])),
        diffuse=(high, float(entropy[high])),
        sink=(layer.key_tokens[key], key, float(received[key] / max(sees.sum(), 1))),
        distance=distance,
    )
