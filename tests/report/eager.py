"""The weights of one call in float64, pair by pair, as its formula says: what a page is held to."""

from __future__ import annotations

from typing import Any

import numpy as np

from clearhead.report.layer import Layer


def scores_of(layer: Layer) -> Any:
    """softcap(scale Σ_d w_d φ(q_d, k_d)), (H, Lq, Lk), of what the layer holds."""
    if layer.scores is not None:
        return layer.scores.astype(np.float64)
    query, key = layer.query.astype(np.float64), layer.key.astype(np.float64)
    key = np.repeat(key, len(query) // len(key), 0)
    q, k = query[:, :, None], key[:, None]
    terms = {"mul": lambda: q * k, "tanh_add": lambda: np.tanh(q + k), "sq_diff": lambda: (q - k) ** 2}[layer.phi]()
    scores = layer.scale * (terms if layer.weight is None else terms * layer.weight).sum(-1)
    return scores if layer.softcap is None else layer.softcap * np.tanh(scores / layer.softcap)


def statistics_of(scores: Any, allowed: Any, sinks: Any, position: int | None) -> dict[str, Any]:
    """All of scores with their bias (H, Lq, Lk), and of which pairs are allowed, bool of that shape."""
    masked = np.where(allowed, scores, -np.inf)
    highest = masked.max(-1, keepdims=True)
    highest = np.where(np.isneginf(highest), 0.0, highest)
    with np.errstate(divide="ignore", invalid="ignore"):
        own = highest[..., 0] + np.log(np.exp(masked - highest).sum(-1))
        total = own if sinks is None else np.where(np.isneginf(own), own, np.logaddexp(own, sinks[:, None]))
        shares, weights = (
            np.where(np.isneginf(own)[..., None] | ~allowed, 0.0, np.exp(masked - each[..., None]))
            for each in (own, total)
        )
        entropy = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(-1)
    counts = allowed.sum(-1)
    i, j = np.indices(allowed.shape[1:])
    return {
        "weights": weights,
        "logsumexp": total,
        "entropy": entropy,
        "received": shares.sum(1),
        "distance": None if position is None else (shares * abs(i + position - j)).sum(-1),
        "counts": counts,
        "expected": (allowed / np.maximum(counts, 1)[..., None]).sum(1),
        "sinkShare": np.zeros_like(own) if sinks is None else np.where(
            np.isneginf(total), 0.0, np.exp(sinks[:, None] - total)
        ),
    }  # fmt: skip


def pooled(weights: Any, allowed: Any, rows: int, columns: int) -> Any:
    """The largest weight of each cell of a matrix, −1 where no pair is allowed."""
    seen = np.where(allowed, weights, -1.0)
    down = np.maximum.reduceat(seen, np.arange(0, len(seen), rows), 0)
    return np.maximum.reduceat(down, np.arange(0, seen.shape[1], columns), 1)
