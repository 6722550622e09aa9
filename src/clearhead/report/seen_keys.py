"""The number of keys that each query of a layer may see, and the weight that each key would receive if uniform."""

from __future__ import annotations

import numpy as np

from clearhead.report.layer import Array, Layer, of_head

ROWS = 128


def masked_heads(layer: Layer) -> int:
    """The number of heads of the mask: 1 where it is the same for all."""
    holes, bias = len(layer.holes), 1 if layer.bias is None else layer.bias.heads
    return max(len(layer.start), len(layer.stop), holes, bias, 1 if layer.seen is None else len(layer.seen))


def seen_keys(layer: Layer) -> tuple[Array, Array]:
    """The number of keys that each query may see, (H or 1, Lq) int32, and Σ_i [j is seen by i] / that, (H or 1, Lk).

    Formula: u_j = Σ_i [i may see j] / n_i. Where some query sees keys that are not shown (`Layer.seen`), they are
    counted in n_i. Spans alone take O(Lq + Lk); any other mask is read one band of rows at a time.
    """
    of = _of_spans if layer.bias is None and not layer.holes else _of_pairs
    counts, expected = zip(*(of(layer, head) for head in range(masked_heads(layer))), strict=True)
    return np.stack(counts), np.stack(expected)


def _of_spans(layer: Layer, head: int) -> tuple[Array, Array]:
    keys = layer.shape[1]
    start, stop = (np.clip(of_head(edge, head), 0, keys) for edge in (layer.start, layer.stop))
    shown = np.maximum(stop - start, 0).astype(np.int32)
    counts = shown if layer.seen is None else of_head(layer.seen, head)
    some = shown > 0
    change = np.zeros((2, keys + 1))  # of the weight that a key receives, and of its queries
    for edge, sign in ((start[some], 1), (stop[some], -1)):
        np.add.at(change[0], edge, sign / counts[some])
        np.add.at(change[1], edge, sign)
    expected, looking = change[:, :keys].cumsum(1)
    return counts, np.where(looking > 0, expected, 0.0)  # a sum of fractions does not return to exactly 0


def _of_pairs(layer: Layer, head: int) -> tuple[Array, Array]:
    queries, keys = layer.shape
    counts, expected = np.zeros(queries, dtype=np.int32), np.zeros(keys)
    for first in range(0, queries, ROWS):
        seen = layer.allowed(head, first, min(first + ROWS, queries))
        here = seen.sum(1) if layer.seen is None else of_head(layer.seen, head)[first : first + ROWS]
        counts[first : first + ROWS] = here
        expected += (1 / np.maximum(here, 1)) @ seen
    return counts, expected
