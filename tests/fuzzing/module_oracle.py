"""What the modules compute, in NumPy's float64, from the tensors of their parameters; and how far from it is near."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fuzzing.options import NONE, Extra, Scaling

Array = np.ndarray
MOVES, MANY, ROUNDINGS = 5, 100, 4


class Rounding:
    """Each product is moved by a few roundings of the sum of its terms' sizes; without a generator by none."""

    def __init__(self, eps: float = 0.0, seed: int | None = None) -> None:
        self.eps, self.generator = eps, None if seed is None else np.random.default_rng(seed)

    def moved(self, x: Array, size: Array) -> Array:
        if self.generator is None:
            return x
        return x + size * self.eps * self.generator.uniform(-ROUNDINGS, ROUNDINGS, x.shape)

    def product(self, x: Array, y: Array) -> Array:
        return self.moved(x @ y, np.abs(x) @ np.abs(y))

    def linear(self, x: Array, weight: Array, bias: Array | None) -> Array:
        x = self.moved(x, np.abs(x))
        y = self.product(x, weight.T)
        return y if bias is None else self.moved(y + bias, np.abs(y) + np.abs(bias))


def softmax(scores: Array, keep: Array, sinks: Array | None = None) -> Array:
    """Over the last axis, among what is kept; 0 where nothing is. `sinks`: (H,), one more term in each sum."""
    scores = np.where(keep, scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None, None])
    weights = np.where(keep, np.exp(scores - np.where(np.isfinite(top), top, 0.0)), 0.0)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = np.where(total > 0, total + np.exp(sinks[:, None, None] - top), 0.0)
    return weights / np.where(total > 0, total, 1.0)


def turned(x: Array, positions: Array, dim: int, base: float, interleaved: bool, scaling: Scaling) -> Array:
    """(..., L, E) with its first entries turned by the angles of the positions (L,)."""
    speeds, magnitude = slowed(base ** (-np.arange(0, dim, 2) / dim), base, scaling)
    angles = positions[:, None] * speeds
    cos, sin, x = magnitude * np.cos(angles), magnitude * np.sin(angles), x.copy()
    pairs = (slice(0, dim, 2), slice(1, dim, 2)) if interleaved else (slice(0, dim // 2), slice(dim // 2, dim))
    a, b = x[..., pairs[0]].copy(), x[..., pairs[1]].copy()
    x[..., pairs[0]], x[..., pairs[1]] = a * cos - b * sin, b * cos + a * sin
    return x


def slowed(plain: Array, base: float, scaling: Scaling) -> tuple[Array, float]:
    """The angles of the pairs at each step under a scaling, and the factor of cosines and sines."""
    if scaling is None:
        return plain, 1.0
    kind, given = scaling
    factor, dim = given["factor"], 2 * len(plain)
    if kind == "linear":
        return plain / factor, 1.0
    turns = given["original_length"] * plain / (2 * np.pi)
    if kind == "llama3":
        kept = np.clip((turns - 1.0) / (4.0 - 1.0), 0, 1)
        return plain * kept + plain / factor * (1 - kept), 1.0
    # the pair that turns so often within the length of the training
    pair = lambda often: dim * np.log(given["original_length"] / (often * 2 * np.pi)) / (2 * np.log(base))
    low, high = pair(32.0), pair(1.0)
    low, high = (np.floor(low), np.ceil(high)) if given["truncate"] else (low, high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(len(plain)) - low) / (high - low if high != low else 0.001), 0, 1)
    return plain * (1 - ramp) + plain / factor * ramp, 0.1 * np.log(factor) + 1


def bucket(apart: Array) -> Array:
    """T5's bucket of each distance, of 8 for both sides up to a distance of 5: 0 and 1 alone, then two that widen."""
    far = np.abs(apart)
    wide = np.minimum(2 + np.floor(np.log(np.maximum(far, 1) / 2) / np.log(5 / 2) * 2).astype(int), 3)
    return 4 * (apart > 0) + np.where(far < 2, far, wide)


def heads_of(x: Array, width: int) -> Array:
    if x.shape[-1] % width:
        raise ValueError("heads that are cut")
    return np.moveaxis(x.reshape(*x.shape[:-1], x.shape[-1] // width, width), -2, 0)  # (H, L, width)


def sequence(
    layers: dict[str, tuple[Array, Array | None]], width: int, rotary: Any, query: Array, key: Array, value: Array,
    first: int | Array, keep: Array, bias: Array | float, rounding: Rounding, key_first: int | Array = 0,
    extra: Extra = NONE, align: int = 0,
) -> Array:  # fmt: skip
    """Multi-head attention of one sequence: (Lq, E), (Lk, …); `keep` and `bias` broadcast to (H, Lq, Lk). `first`,
    `key_first`: the first position of queries and of keys, or each one's. `align`: the key at which query 0 stands."""
    q, k, v = (
        heads_of(rounding.linear(x, *layers[name]), width) for name, x in (("W_q", query), ("W_k", key), ("W_v", value))
    )
    q = q if extra.query_norm is None else extra.query_norm.of(q, rounding)
    k = k if extra.key_norm is None else extra.key_norm.of(k, rounding)
    if rotary is not None:
        at = [p if isinstance(p, Array) else p + np.arange(x.shape[1]) for p, x in ((first, q), (key_first, k))]
        q, k = turned(q, at[0], *rotary), turned(k, at[1], *rotary)
        q, k = rounding.moved(q, np.abs(q)), rounding.moved(k, np.abs(k))
    k, v = (np.repeat(t, len(q) // len(k), 0) for t in (k, v))
    if extra.scale is not None:
        q = q * extra.scale
        q = rounding.moved(q, np.abs(q))
    scores = rounding.product(q, np.swapaxes(k, -1, -2)) / (width**0.5 if extra.scale is None else 1.0)
    if extra.slopes is not None:
        bias = bias - extra.slopes * np.abs(np.arange(k.shape[1]) - np.arange(q.shape[1])[:, None] - align)
    if extra.buckets is not None:
        bias = bias + extra.buckets[:, bucket(np.arange(k.shape[1]) - np.arange(q.shape[1])[:, None] - align)]
    scores = scores + bias
    scores = rounding.moved(scores, np.abs(scores) + np.abs(bias))
    weights = softmax(scores, np.broadcast_to(keep, scores.shape), extra.sinks)
    heads = rounding.product(rounding.moved(weights, weights), v)
    if extra.gate is not None:
        weight, shift, by_number = extra.gate
        gates = heads_of(1 / (1 + np.exp(-rounding.linear(query, weight, shift))), width if by_number else 1)
        heads = heads * gates
        heads = rounding.moved(heads, np.abs(heads))
    return rounding.linear(np.moveaxis(heads, 0, -2).reshape(len(query), heads.shape[0] * width), *layers["W_o"])


def apart(got: Array, of: Callable[[Rounding], Array], eps: float, tiny: float) -> str | None:
    """What is wrong with a result, in words; None where it is within its budget."""
    truth = of(Rounding())
    if got.shape != truth.shape:
        return f"shape {got.shape} where {truth.shape} is right"
    if not got.size:
        return None
    distance = np.abs(got - truth)
    # Of large scores, as at a temperature near 0, two may be so near to each other that the larger one changes, and few
    # moves do not show it: so many decide, where few say that a result is wrong.
    for number in (MOVES, MANY):
        moves = np.max([np.abs(of(Rounding(eps, seed)) - truth) for seed in range(number)], 0)
        # of few moves one may be near 0 where it should not: each entry has that of the typical one too
        budget = 4 * np.maximum(moves, moves.mean()) + 8 * eps * np.abs(truth) + 64 * tiny
        if (distance <= budget).all():
            break
    else:
        worst = np.unravel_index(np.argmax(np.where(np.isnan(distance), np.inf, distance - budget)), got.shape)
        return f"off by {distance[worst]:.3g} beyond {budget[worst]:.3g} at {worst}"
    return None
