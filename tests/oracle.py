"""Attention by its formulas: float64, NumPy alone, nothing of clearhead and nothing of torch.

A `Problem` is plain data: arrays, numbers and tuples. `attend` gives everything that can be asked of it: scores,
weights, output, log-sum-exp, entropy, and with a loss the gradients, written out. The reductions are functions of the
weights. Masks, scores and biases are written as tuples, whose first item names a function of this file:

    masks   ("lengths", n) ("padding", keep) ("causal",) ("window", before, after) ("documents", ids) ("prefix", n)
            ("packed", cu_q, cu_k, mask inside each document) ("intervals", start, stop) ("where", factors)
            ("dense", keep) ("and", a, b) ("or", a, b) ("not", a)
    scores  (kind, {settings}, {learnt arrays}), the kinds being those of `SCORES`; any may have the settings "softcap"
            and "then", the rate of `nearness`
    biases  (kind, {settings}, {learnt arrays}), the kinds being those of `BIASES`
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Problem:
    """One attention. query (..., Lq, Eq), key (..., Lk, Ek), value (..., Lk, Ev), broadcast as `attention` does."""

    query: Array
    key: Array
    value: Array
    score: tuple[str, dict[str, Any], dict[str, Array]] = ("dot", {}, {})
    mask: Any = None
    align: Any = None  # "upper_left", "lower_right", the position of query 0, (B,) of them, or None where Lq = Lk
    biases: tuple[Any, ...] = ()
    scale: float | None = None  # what the call gives; None: the score's own
    sinks: Array | None = None  # (H,)
    dropout_p: float = 0.0
    seed: int = 0

    @property
    def inputs(self) -> tuple[Array, Array, Array]:
        return self.query, self.key, self.value

    @property
    def by_functions(self) -> bool:
        """Whether a function of a caller's takes part in the scores."""
        return self.score[0] in ("smooth", "sines") or "then" in self.score[1]


def mapped(p: Problem, number: Callable[[Array], Array], added: Callable[[Array], Array]) -> Problem:
    """The problem with `number` of each array, and `added` of those that are added to scores: biases and sinks."""
    kind, settings, learnt = p.score
    score = kind, settings, {name: number(x) for name, x in learnt.items()}
    biases = tuple((k, s, {name: added(x) for name, x in arrays.items()}) for k, s, arrays in p.biases)
    query, key, value = (number(x) for x in p.inputs)
    sinks = None if p.sinks is None else added(p.sinks)
    return replace(p, query=query, key=key, value=value, score=score, biases=biases, sinks=sinks)


@dataclass
class Loss:
    """A loss by what it gives each result for a gradient; arrays begin with the problem's leading dimensions."""

    output: Array | None = None  # (..., Lq, Ev)
    weights: Array | None = None  # (..., Lq, Lk), of a function of the weights
    shares: Array | None = None  # the same, of the weights of the keys alone
    entropy: Array | None = None  # (..., Lq), and so are the others
    logsumexp: Array | None = None  # 0 where a query sees nothing, and so is the next
    best: Array | None = None  # of the largest score
    sink: Array | None = None

    @property
    def arrays(self) -> dict[str, Array]:
        return {name: x for name, x in vars(self).items() if x is not None}


@dataclass
class Found:
    """What there is to know of a problem; arrays begin with its leading dimensions."""

    raw: Array  # scores before bias and mask, (..., Lq, Lk)
    weights: Array  # before dropout
    logsumexp: Array
    entropy: Array  # of `shares`
    output: Array
    shares: Array  # the weights of the keys alone, which sum to 1
    scores: Array  # with bias, −∞ where masked
    sink: Array  # the sink's share, (..., Lq)
    gradients: dict[str, Array]
    keep: Array
    terms: dict[str, Array] = field(default_factory=dict)  # the sizes of what a bias's or sink's gradient is a sum of


class Sizes:
    """How inputs of these shapes fold to (B, H, L, E), and what is given back."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        self.depth = max(map(len, shapes))
        self.queries, self.keys = shapes[0][-2], shapes[1][-2]
        if self.depth <= 3:
            self.lead = np.broadcast_shapes(*(shape[:-2] for shape in shapes))
            self.outer, self.heads = self.lead, 1
        else:
            padded = [(1,) * (self.depth - len(shape)) + tuple(shape) for shape in shapes]
            self.outer = np.broadcast_shapes(*(shape[:-3] for shape in padded))
            self.heads = max(shape[-3] for shape in padded)
            self.lead = (*self.outer, self.heads)
        self.batch = math.prod(self.outer)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.queries, self.keys

    def fold(self, x: Array) -> Array:
        """(B, H, L, E): heads repeated for their groups, leading dimensions broadcast."""
        if self.depth <= 3:
            return np.broadcast_to(x, (*self.outer, *x.shape[-2:])).reshape(self.batch, 1, *x.shape[-2:])
        x = x.reshape((1,) * (self.depth - x.ndim) + x.shape)
        if x.shape[-3] != self.heads:
            x = np.repeat(x, self.heads // x.shape[-3], axis=-3)
        return np.broadcast_to(x, (*self.outer, *x.shape[-3:])).reshape(self.batch, self.heads, *x.shape[-2:])

    def unfold(self, gradient: Array, shape: tuple[int, ...]) -> Array:
        """The gradient to an input of this shape: what was repeated is summed."""
        inner = gradient.shape[-2:]
        if self.depth <= 3:
            return reduced(gradient.reshape(*self.outer, *inner), shape)
        heads = shape[-3] if len(shape) > 2 else 1
        groups = self.heads // heads if heads else 0
        return reduced(gradient.reshape(*self.outer, heads, groups, *inner).sum(-3), shape)

    def restore(self, x: Array) -> Array:
        return x.reshape(*self.lead, *x.shape[2:])


def reduced(x: Array, shape: tuple[int, ...]) -> Array:
    """Summed to a shape that broadcasts to its own."""
    x = x.sum(tuple(range(x.ndim - len(shape)))) if x.ndim > len(shape) else x
    along = tuple(i for i, n in enumerate(shape) if n == 1 and x.shape[i] != 1)
    return x.sum(along, keepdims=True) if along else x


# Masks ---------------------------------------------------------------------------------------------------------------


def positions(align: Any, sizes: Sizes) -> Array:
    """Where each query stands among the keys, (B or 1, 1, Lq, 1)."""
    first = {"lower_right": sizes.keys - sizes.queries}.get(align, 0) if align is None or isinstance(align, str) else 0
    if first == 0 and not (align is None or isinstance(align, str)):
        first = np.asarray(align, dtype=np.int64).reshape(-1, 1, 1, 1)
    return first + np.arange(sizes.queries).reshape(1, 1, -1, 1)


def positions_in(mask: Any, align: Any, sizes: Sizes) -> Array:
    """The same where a mask may have documents, which `align` is meant for."""
    while mask is not None and mask[0] == "not":
        mask = mask[1]
    if mask is None or mask[0] != "packed" or not sizes.queries:
        return positions(align, sizes)
    cu_q, cu_k = mask[1:3]
    each = np.diff(cu_k) - np.diff(cu_q) if isinstance(align, str) and align == "lower_right" else align
    first = positions(each, padded(cu_q, cu_k, sizes))[:, 0, :1, 0] + (cu_k - cu_q)[:-1, None]
    own = np.broadcast_to(first[:, 0], len(cu_q) - 1).repeat(np.diff(cu_q)) + np.arange(sizes.queries)
    return own.reshape(1, 1, -1, 1)


def allowed(mask: Any, sizes: Sizes, align: Any) -> Array:
    """Which pairs a mask allows, bool (B, H, Lq, Lk)."""
    return np.broadcast_to(True if mask is None else _allowed(mask, sizes, align), sizes.shape)


def _allowed(mask: Any, sizes: Sizes, align: Any) -> Array:
    kind, *given = mask
    keys, own = np.arange(sizes.keys).reshape(1, 1, 1, -1), positions(align, sizes)
    if kind == "and":
        return _allowed(given[0], sizes, align) & _allowed(given[1], sizes, align)
    if kind == "or":
        return _allowed(given[0], sizes, align) | _allowed(given[1], sizes, align)
    if kind == "not":
        return ~np.asarray(_allowed(given[0], sizes, align))
    if kind == "lengths":
        lengths = np.asarray(given[0])
        return keys < (lengths[:, None, :, None] if lengths.ndim == 2 else lengths.reshape(-1, 1, 1, 1))
    if kind == "padding":
        return (np.asarray(given[0]) != 0)[:, None, None, :]
    if kind == "causal":
        return keys <= own
    if kind == "window":
        return (keys >= own - given[0]) & (keys <= own + given[1])
    if kind == "prefix":
        return keys < np.maximum(own + 1, np.asarray(given[0]).reshape(-1, 1, 1, 1))
    if kind == "documents":
        return _documents(np.asarray(given[0]), own, sizes)
    if kind == "packed":
        return _packed(*given, sizes, align)
    if kind == "intervals":
        start, stop = (_per_query(np.asarray(edge)) for edge in given)
        return (keys >= start) & (keys < stop)
    if kind == "where":
        grids = np.ix_(*(np.arange(size) for size in sizes.shape))
        return sum(f * grid for f, grid in zip(given[0], grids, strict=True)) % 3 > 0
    assert kind == "dense", kind
    return per_pair(np.asarray(given[0]), sizes)


def _documents(ids: Array, own: Array, sizes: Sizes) -> Array:
    if not sizes.keys:
        return np.zeros(sizes.shape, dtype=bool)
    ids = ids.reshape(-1, sizes.keys)
    (batch,) = np.broadcast_shapes((len(ids),), (len(own),))
    ids, own = np.broadcast_to(ids, (batch, sizes.keys)), np.broadcast_to(own[:, 0, :, 0], (batch, sizes.queries))
    inside = (own >= 0) & (own < sizes.keys)
    mine = np.take_along_axis(ids, own.clip(0, sizes.keys - 1), 1)
    return (inside[:, :, None] & (mine[:, :, None] == ids[:, None, :]))[:, None]


def padded(cu_q: Array, cu_k: Array, sizes: Sizes) -> Sizes:
    """The sizes of the batch that has one sequence for each document of a row."""
    leading = (len(cu_q) - 1, sizes.heads) if sizes.depth > 3 else (len(cu_q) - 1,)
    return Sizes(*((*leading, max(np.diff(sums), default=0), 1) for sums in (cu_q, cu_k)))


def _packed(cu_q: Array, cu_k: Array, inside: Any, sizes: Sizes, align: Any) -> Array:
    """Documents by the sums of their lengths, and the mask and the alignment of each of them."""
    each = np.diff(cu_k) - np.diff(cu_q) if isinstance(align, str) and align == "lower_right" else align
    own = allowed(inside, padded(cu_q, cu_k, sizes), each)
    keep = np.zeros((1, *sizes.shape[1:]), dtype=bool)
    for n, (rows, columns) in enumerate(zip(np.diff(cu_q), np.diff(cu_k), strict=True)):
        keep[0, :, cu_q[n] : cu_q[n + 1], cu_k[n] : cu_k[n + 1]] = own[n, :, :rows, :columns]
    return keep


def _per_query(edge: Array) -> Array:
    """(Lq,), (B, Lq) or (B, H, Lq) as (B or 1, H or 1, Lq, 1)."""
    edge = edge[:, None] if edge.ndim == 2 else edge
    return edge.reshape((1,) * (3 - edge.ndim) + edge.shape)[..., None]


def per_pair(x: Array, sizes: Sizes) -> Array:
    """(..., Lq, Lk) of the caller's dimensions as something that broadcasts to (B, H, Lq, Lk)."""
    return np.broadcast_to(x, (*sizes.lead, sizes.queries, sizes.keys)).reshape(sizes.shape)


# Scores: each gives the scores, and a function from their gradient to those of the query, the key and what is learnt --


def product(x: Array, matrix: Array, step: Any) -> Array:
    """x @ matrix, each number moved by some roundings of the terms it is a sum of."""
    exact = x @ matrix
    return exact if step is None else exact + step(exact.shape) * (np.abs(x) @ np.abs(matrix))


def scored(p: Problem, q: Array, k: Array, step: Any = None) -> Any:
    """The scores of a problem: softcap(scale · score(q, k)), softcap(s) = c · tanh(s / c)."""
    kind, settings, learnt = p.score
    settings = {"step": step} | settings if kind in PRODUCTS else dict(settings)
    cap, then, scale = settings.pop("softcap", None), settings.pop("then", None), p.scale
    if kind == "dot" and scale is not None:  # in place of its own
        settings, scale = settings | {"scale": scale}, None
    tile, undo = SCORES[kind](q, k, **settings, **learnt)
    scale = 1.0 if scale is None else scale
    raw = scale * tile
    near_by = 1.0 if then is None else nearness(raw.shape, then)
    if cap is None:
        return near_by * raw, lambda ds: undo(scale * near_by * ds)
    t = np.tanh(raw / cap)

    def back(ds: Array) -> Any:
        ds = near_by * ds
        if step is None:
            return undo(scale * ds / np.cosh(raw / cap) ** 2)
        near = t * (1 + step(t.shape))  # what a rounded tanh leaves of 1 − tanh², as in eager code
        return undo(scale * ds * (1 - near * near))

    return near_by * cap * t, back


def nearness(shape: tuple[int, ...], rate: float) -> Array:
    """The fuzz's own change of scores: each is multiplied by 1 / (1 + rate |i − j + h − b|)."""
    b, h, i, j = np.ogrid[tuple(slice(0, size) for size in shape)]
    return 1 / (1 + rate * np.abs(i - j + h - b))


def dot(q: Array, k: Array, scale: float | None = None, step: Any = None) -> Any:
    width = q.shape[-1]
    scale = (width**-0.5 if width else 1.0) if scale is None else scale

    def back(ds: Array) -> Any:
        return scale * ds @ k, scale * ds.swapaxes(-1, -2) @ q, {}

    return scale * product(q, k.swapaxes(-1, -2), step), back


def bilinear(q: Array, k: Array, W: Array, step: Any = None) -> Any:
    projected = product(q, W, step)

    def back(ds: Array) -> Any:
        to_projected = ds @ k
        to_weight = np.einsum("bhie,bhif->ef", q, to_projected)
        return to_projected @ W.T, ds.swapaxes(-1, -2) @ projected, {"W": to_weight}

    return product(projected, k.swapaxes(-1, -2), step), back


def additive(
    q: Array, k: Array, w_v: Array, W_q: Array | None = None, W_k: Array | None = None, step: Any = None
) -> Any:
    a, b = (x if w is None else product(x, w.T, step) for x, w in ((q, W_q), (k, W_k)))
    t = np.tanh(a[..., :, None, :] + b[..., None, :, :])

    def back(ds: Array) -> Any:
        near = t if step is None else t * (1 + step(t.shape))  # what a rounded tanh leaves of 1 − tanh²
        inner = ds[..., None] * (1 - near * near) * w_v
        sides = inner.sum(-2), inner.sum(-3)
        learnt = {"w_v": np.einsum("bhij,bhijd->d", ds, t)}
        found = []
        for x, w, side, name in ((q, W_q, sides[0], "W_q"), (k, W_k, sides[1], "W_k")):
            if w is not None:
                learnt[name] = np.einsum("bhid,bhie->de", side, x)
            found.append(side if w is None else side @ w)
        return *found, learnt

    return t @ w_v, back


def cosine(q: Array, k: Array, temperature: float = 1.0, step: Any = None) -> Any:
    lengths = [np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k)]
    lengths = [np.where(n > 0, n, 1.0) for n in lengths]
    u, v = q / lengths[0], k / lengths[1]

    def back(ds: Array) -> Any:
        to_u, to_v = ds @ v / temperature, ds.swapaxes(-1, -2) @ u / temperature
        along = [(g - x * (g * x).sum(-1, keepdims=True)) for g, x in ((to_u, u), (to_v, v))]
        return along[0] / lengths[0], along[1] / lengths[1], {}

    return product(u, v.swapaxes(-1, -2), step) / temperature, back


def gaussian(q: Array, k: Array, bandwidth: float = 1.0) -> Any:
    apart = q[..., :, None, :] - k[..., None, :, :]

    def back(ds: Array) -> Any:
        inner = ds[..., None] * apart / -(bandwidth**2)
        return inner.sum(-2), -inner.sum(-3), {}

    return -(apart**2).sum(-1) / (2 * bandwidth**2), back


def smooth(q: Array, k: Array) -> Any:
    """The fuzz's own function: −Σ √(1 + (q − k)²)."""
    apart = q[..., :, None, :] - k[..., None, :, :]
    root = np.sqrt(1 + apart**2)

    def back(ds: Array) -> Any:
        inner = -ds[..., None] * apart / root
        return inner.sum(-2), -inner.sum(-3), {}

    return -root.sum(-1), back


def sines(q: Array, k: Array, w: Array) -> Any:
    """The fuzz's own score with something learnt: Σ w sin(q − k)."""
    apart = q[..., :, None, :] - k[..., None, :, :]

    def back(ds: Array) -> Any:
        inner = ds[..., None] * np.cos(apart) * w
        return inner.sum(-2), -inner.sum(-3), {"w": np.einsum("bhij,bhijd->d", ds, np.sin(apart))}

    return np.sin(apart) @ w, back


PRODUCTS = ("bilinear", "additive")  # which move what they are sums of by some roundings
SCORES = {f.__name__: f for f in (dot, bilinear, additive, cosine, gaussian, smooth, sines)}


# Biases: each gives what is added, and a function from the scores' gradient to those of what is learnt ----------------


def alibi(sizes: Sizes, align: Any, slopes: Array) -> Any:
    far = np.abs(positions(align, sizes) - np.arange(sizes.keys))
    added = -slopes.reshape(1, -1, 1, 1) * far
    return added, lambda ds: {"slopes": -(ds * far).sum((0, 2, 3))}


def relative(sizes: Sizes, align: Any, weight: Array, num_buckets: int, max_distance: int, bidirectional: bool) -> Any:
    at = buckets(np.arange(sizes.keys) - positions(align, sizes), num_buckets, max_distance, bidirectional)
    at = np.broadcast_to(at[:, 0], (sizes.batch, sizes.queries, sizes.keys))

    def back(ds: Array) -> Any:
        found = np.zeros_like(weight)
        for head in range(sizes.heads):
            found[:, head] = np.bincount(at.ravel(), ds[:, head].ravel(), len(weight))
        return {"weight": found}

    return weight[at].transpose(0, 3, 1, 2), back


def buckets(apart: Array, num_buckets: int, max_distance: int, bidirectional: bool) -> Array:
    """T5's bucket of a distance, key position less query position."""
    if bidirectional:
        num_buckets //= 2
        after, far = (apart > 0) * num_buckets, np.abs(apart)
    else:
        after, far = np.zeros_like(apart), np.maximum(-apart, 0)
    exact = num_buckets // 2
    growth = np.log(np.maximum(far, 1) / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    border = np.abs(growth - growth.round()) < 1e-5  # there the float32 steps of the rule decide, not this
    assert not (border & (far > exact) & (growth < num_buckets - exact - 0.5)).any(), "a distance on a bucket's border"
    wide = np.minimum(exact + (growth + 1e-9).astype(np.int64), num_buckets - 1)
    return after + np.where(far < exact, far, wide)


def dense(sizes: Sizes, align: Any, tensor: Array) -> Any:
    back = lambda ds: {"tensor": reduced(ds.reshape(*sizes.lead, *ds.shape[2:]), tensor.shape)}
    return per_pair(tensor, sizes), back


def distance(sizes: Sizes, align: Any, table: Array) -> Any:
    at = np.arange(sizes.keys) - np.arange(sizes.queries)[:, None] + sizes.queries - 1
    wide = table.reshape((1,) * (3 - table.ndim) + table.shape)

    def back(ds: Array) -> Any:
        found = np.zeros((sizes.batch, sizes.heads, table.shape[-1]))
        np.add.at(found, (slice(None), slice(None), at), ds)
        return {"table": reduced(found, wide.shape).reshape(table.shape)}

    return wide[:, :, at], back


BIASES = {f.__name__: f for f in (alibi, relative, dense, distance)}


# Dropout -------------------------------------------------------------------------------------------------------------


def mix(x: Array) -> Array:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def dropout(p: float, seed: int, shape: tuple[int, ...]) -> Array:
    """What each weight is multiplied by: 0 or 1 / (1 − p), by the hash that clearhead.base.dropout writes down."""
    b, h, i, j = (np.arange(size, dtype=np.uint32) for size in shape)
    low, high = (np.array([part & 0xFFFFFFFF], dtype=np.uint32) for part in (seed, seed >> 32))
    row = mix(mix(mix(mix(mix(low) + high) + b)[:, None] + h)[:, :, None] + i)
    x = row[..., None] + mix(j + np.uint32(0x9E3779B9))
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return (x.view(np.int32).astype(np.int64) >= round(p * 2**32) - 2**31) / (1 - p)


# The whole -----------------------------------------------------------------------------------------------------------


def attend(p: Problem, loss: Array | Loss | None = None, step: Any = None) -> Found:
    """Everything about a problem; with a loss, its gradients to every input and what is learnt. An array: the output's.

    `step(shape)`, where given, draws relative roundings: of projections and scores, of the log-sum-exp that a backward
    pass begins with, of the two numbers whose difference the softmax's gradient is, and of a tanh whose square is taken
    from 1.
    """
    with np.errstate(all="ignore"):
        return _attend(p, Loss(loss) if isinstance(loss, np.ndarray) else loss, step)


def _attend(p: Problem, loss: Loss | None, step: Any) -> Found:
    sizes = Sizes(*(x.shape for x in p.inputs))
    keep = allowed(p.mask, sizes, p.align)
    q, k, v = (sizes.fold(x) for x in p.inputs)
    # entries that are not finite, and that no query sees, contribute nothing
    sees, seen = keep.any(3)[..., None], _by_group(keep.any(2), sizes, p.inputs[1:])[..., None]
    q = np.where(~sees & ~np.isfinite(q), 0.0, q)
    k, v = (np.where(~seen & ~np.isfinite(x), 0.0, x) for x in (k, v))
    raw, back = scored(p, q, k, step)
    s, backs = raw, []
    for name, given, tensors in p.biases:
        added, undo = BIASES[name](sizes, p.align, **given, **tensors)
        s = s + added
        backs.append(undo)
    s = s if step is None else s * (1 + step(s.shape))
    s = np.where(keep, s, -np.inf)
    top = s.max(-1, initial=-np.inf)
    blind = top == -np.inf
    column = None if p.sinks is None else np.broadcast_to(p.sinks.reshape(1, -1, 1), top.shape)
    top = np.where(blind, 0.0, top if column is None else np.maximum(top, column))
    total = np.exp(s - top[..., None]).sum(-1)
    total = total if column is None else total + np.exp(column - top)
    lse = top + np.log(np.where(blind, 1.0, total))
    logs = s - lse[..., None]
    w = np.where(s == -np.inf, 0.0, np.exp(logs))  # in a row of NaN too
    alone = s - s.max(-1, initial=-np.inf, keepdims=True)
    shares = np.where(blind[..., None], 0.0, np.exp(alone))
    over_keys = np.where(blind, 1.0, shares.sum(-1))[..., None]
    shares = shares / over_keys
    entropy = -(shares * np.where(shares == 0, 0.0, alone - np.log(over_keys))).sum(-1)
    sink = np.where(blind, 0.0, np.exp(column - lse)) if column is not None else np.zeros_like(lse)
    factors = dropout(p.dropout_p, p.seed, sizes.shape) if p.dropout_p else 1.0
    output = (w * factors) @ v
    lse_or_none = np.where(blind, -np.inf, lse)
    found = Found(*map(sizes.restore, (raw, w, lse_or_none, entropy, output, shares, s, sink)), {}, keep)
    if loss is None:
        return found
    given = {name: x.reshape(*sizes.shape[:3], *x.shape[len(sizes.lead) + 1 :]) for name, x in loss.arrays.items()}
    g = given.get("output", np.zeros_like(output))
    dw = (g @ v.swapaxes(-1, -2)) * factors + given.get("weights", 0.0)
    delta = (w * dw).sum(-1) - given.get("logsumexp", 0.0)
    if "sink" in given:
        delta = delta + given["sink"] * sink
    ds = w * (dw - delta[..., None])
    dv = (w * factors).swapaxes(-1, -2) @ g
    dsh = np.broadcast_to(np.asarray(given.get("shares", 0.0)), w.shape)
    if "entropy" in given:
        logs_alone = np.where(shares == 0, 0.0, alone - np.log(over_keys))
        dsh = dsh - given["entropy"][..., None] * logs_alone
    mean = (shares * dsh).sum(-1, keepdims=True)
    ds = ds + shares * (dsh - mean)
    if "best" in given and sizes.keys:
        first = np.arange(sizes.keys) == s.argmax(-1)[..., None]
        ds = ds + np.where(first, given["best"][..., None], 0.0)
    if step is not None:
        # a backward pass computes the scores again, perhaps in another order than those of the log-sum-exp it is given
        largest_score = np.abs(raw).max((2, 3), initial=0.0)[..., None]
        row = (step(delta.shape) * (np.abs(lse) + largest_score))[..., None]
        logs = np.abs(np.where(shares == 0, 0.0, alone - np.log(over_keys)))
        terms = w * np.abs(given.get("weights", 0.0)) + shares * np.abs(np.asarray(given.get("shares", 0.0)))
        if "entropy" in given:  # the log of a sum near 1 has an error of one rounding of 1
            terms = terms + shares * np.abs(given["entropy"])[..., None] * (logs + 1)
        ds = ds + step(w.shape) * (terms + w * np.abs(delta)[..., None]) + step(mean.shape) * np.abs(mean) * shares
        # With weights P(1 + ρ), ρ one number a row, δ's sum over the weights' own gradients, Σ P Ẇ, is (1 + ρ) times as
        # large, and so Ṡ is off by −ρ P Σ P Ẇ for all keys of a row, however small the difference of the terms is.
        of_weights = (w * given.get("weights", 0.0)).sum(-1, keepdims=True)
        ds = ds * (1 + row) - row * w * of_weights
        ds = ds + step(w.shape) * w * factors * (np.abs(g) @ np.abs(v).swapaxes(-1, -2))
        dv = dv + (w * factors * row).swapaxes(-1, -2) @ g
    dq, dk, to_learnt = back(ds)
    shapes = (p.query.shape, p.key.shape, p.value.shape)
    named = zip(("query", "key", "value"), (dq, dk, dv), shapes, strict=True)
    found.gradients = {name: sizes.unfold(x, shape) for name, x, shape in named}
    found.gradients |= {f"score.{name}": x for name, x in to_learnt.items()}
    if column is not None:
        found.gradients["sinks"] = (sink * (given.get("sink", 0.0) - delta)).sum((0, 2))
        if "sink" in given:  # the sums of the two may be taken apart
            found.terms["sinks"] = (sink * (np.abs(given["sink"]) + np.abs(delta))).sum((0, 2))
    sizes_of_terms = w * (factors * (np.abs(g) @ np.abs(v).swapaxes(-1, -2)) + np.abs(delta)[..., None])
    for i, undo in enumerate(backs):
        found.gradients |= {f"bias.{i}.{name}": x for name, x in undo(ds).items()}
        found.terms |= {f"bias.{i}.{name}": np.abs(x) for name, x in undo(sizes_of_terms).items()}
    return found


def _by_group(seen: Array, sizes: Sizes, shared: tuple[Array, ...]) -> Array:
    """Keys (B, H, Lk) seen by some query of any head that shares their key head."""
    heads = max(x.shape[-3] if x.ndim > 2 else 1 for x in shared) if sizes.depth > 3 else 1
    if heads in (0, sizes.heads):
        return seen
    together = seen.reshape(sizes.batch, heads, sizes.heads // heads, sizes.keys).any(2)
    return np.repeat(together, sizes.heads // heads, axis=1)


# Reductions of the weights, (..., Lq, Lk) -----------------------------------------------------------------------------


def largest(weights: Array, k: int) -> Array:
    """The k largest of each row, descending."""
    return -np.sort(-weights, axis=-1)[..., :k]


def received(weights: Array) -> Array:
    return weights.sum(-2)


def mass(weights: Array, ids: Array, sizes: Sizes) -> Array:
    """The sum of the weights of each group's keys; `ids`: (B or 1, Lk)."""
    every = weights.reshape(sizes.shape)
    groups = [np.where(ids[:, None, None] == g, every, 0.0).sum(-1) for g in range(ids.max() + 1)]
    return sizes.restore(np.stack(groups, -1))


def mean_distance(weights: Array, mask: Any, align: Any, sizes: Sizes) -> Array:
    far = np.abs(positions_in(mask, align, sizes) - np.arange(sizes.keys))
    return sizes.restore((weights.reshape(sizes.shape) * far).sum(-1))


def pool(weights: Array, size: int | tuple[int, int], how: str) -> Array:
    """The largest or the mean of each cell of ⌈Lq / rows⌉ × ⌈Lk / columns⌉ weights."""
    steps = [
        -(-n // s) or 1
        for n, s in zip(weights.shape[-2:], (size, size) if isinstance(size, int) else size, strict=True)
    ]
    for axis, step in zip((-2, -1), steps, strict=True):
        borders = np.arange(0, weights.shape[axis], step)
        if not len(borders):
            continue
        if how == "max":
            weights = np.maximum.reduceat(weights, borders, axis)
        else:
            counts = np.diff(np.append(borders, weights.shape[axis]))
            weights = np.add.reduceat(weights, borders, axis) / (counts[:, None] if axis == -2 else counts)
    return weights
