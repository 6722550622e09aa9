"""The data of one attention call in the page."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # a page is written without torch
    from clearhead.scores.pair_functions import Phi

Array = NDArray[Any]
SIDE = 128


class Tiles(NamedTuple):
    """A matrix (Lq, Lk) in tiles.

    `places`, (rows, columns) int32: for each tile the place of its numbers in `tiles`, (n, side, side), bool or
    float32; −1 for a tile of zeros. The last tiles of a row and of a column are filled up with zeros.
    """

    places: Array
    tiles: Array

    def rows(self, first: int, last: int, keys: int) -> Array:
        """The rows of the matrix from `first` up to `last`, (last − first, keys)."""
        side = self.tiles.shape[-1]
        bands = self.places[first // side : -(-last // side)]
        found = np.where((bands < 0)[..., None, None], np.zeros_like(self.tiles[:1]), self.tiles[bands])
        matrix = found.swapaxes(1, 2).reshape(len(bands) * side, -1)
        start = first - first // side * side
        return matrix[start : start + last - first, :keys]


def tiled(band: Callable[[int, int], Array], queries: int, keys: int) -> Tiles | None:
    """The tiles of a matrix (queries, keys); None where all are zeros. `band(first, last)` gives rows of the matrix."""
    side = min(SIDE, max(16, 1 << (max(queries, keys) - 1).bit_length()))
    across = -(-keys // side)
    places, kept, numbers = list[Array](), list[Array](), dict[bytes, int]()
    for first in range(0, queries, side):
        rows = band(first, min(first + side, queries))
        padded = np.zeros((side, across * side), dtype=rows.dtype)
        padded[: len(rows), :keys] = rows
        tiles = padded.reshape(side, across, side).swapaxes(0, 1)
        here = np.full(across, -1, dtype=np.int32)
        for column in np.flatnonzero((tiles != 0).any((1, 2))):
            tile = np.ascontiguousarray(tiles[column])
            number = numbers.setdefault(hashlib.sha256(tile.data).digest(), len(kept))
            if number == len(kept):
                kept.append(tile)
            here[column] = number
        places.append(here)
    return Tiles(np.stack(places), np.stack(kept)) if kept else None


class About(NamedTuple):
    """The words of the page about a statistic of heads; a `Measure` has the same attributes."""

    name: str
    says: str
    formula: str
    range: str
    does: str | None


# by measure, or About: value, uniform attention's value, key or None, and perhaps the number of queries
Measures = Mapping[Any, tuple[float, float, int | None] | tuple[float, float, int | None, int]]


@dataclass(frozen=True, eq=False)
class PageBias:
    """The bias of scores, float32: the sum of the parts that are given. −∞ hides a pair.

    Attributes:
        relative: (H or 1, Lq + Lk − 1), one number for each distance: entry j − i + Lq − 1 for the pair (i, j).
        dense: (H or 1, Lq or 1, Lk or 1), one of the last two being 1, or both.
        tiles: one for each head, or one for all, with any other bias; None for a head where they are zeros.
    """

    relative: Array | None = None
    dense: Array | None = None
    tiles: tuple[Tiles | None, ...] = ()

    @property
    def numbers(self) -> list[Array]:
        """All arrays of the bias."""
        tiles = [each.tiles for each in self.tiles if each is not None]
        return [array for array in (self.relative, self.dense, *tiles) if array is not None]

    @property
    def heads(self) -> int:
        """The number of heads: 1 where the bias is the same for all."""
        parts = [p for p in (self.relative, self.dense, self.tiles) if p is not None and len(p)]
        return max((len(part) for part in parts), default=1)

    def rows(self, head: int, first: int, last: int, shape: tuple[int, int]) -> Array:
        """The bias of the rows from `first` up to `last` of a matrix of this shape, float32."""
        queries, keys = shape
        total = np.zeros((last - first, keys), dtype=np.float32)
        if self.relative is not None:
            windows = np.lib.stride_tricks.sliding_window_view(of_head(self.relative, head), keys)
            total = total + windows[queries - last : queries - first][::-1]
        if self.dense is not None:
            dense = of_head(self.dense, head)
            total = total + (dense if len(dense) == 1 else dense[first:last])
        tiles = _tiles_of(self.tiles, head)
        return total if tiles is None else total + tiles.rows(first, last, keys)


@dataclass(frozen=True, eq=False)
class Pyramid:
    """The weights of a long head in cells: codes of 16 bits (H, rows, columns), see `_blocks.py`.

    `max` and `mean`: the largest weight of each cell, and the mean over its pairs, allowed or not. `per_row`,
    `per_column`: the queries and keys of a cell.
    """

    max: Array
    mean: Array
    per_row: int
    per_column: int


@dataclass(frozen=True, eq=False)
class Slopes:
    """The gradient of the output, from which A_ij ∂L/∂A_ij = w_ij Σ_e grad_ie value_je follows for every pair.

    `grad`: (H, Lq, Ev); `value`: (Hk, Lk, Ev), where Hk divides H. `steps`: (H, Ev) and (Hk, Ev), of which they are
    whole multiples; None writes float32. `raises`, `lowers`: (H, Lk), for each key the sum of the products above 0
    over the queries, and the sum of those below 0 without their sign.
    """

    grad: Array
    value: Array
    steps: tuple[Array, Array] | None
    raises: Array
    lowers: Array


@dataclass(frozen=True, eq=False)
class Layer:
    """One attention call on one sequence, with all numbers that are needed to compute its weights again.

    The weights themselves are not kept: they grow with the square of the length, the queries and
    keys do not. The weight of query i on key j is, where `start[i] <= j < stop[i]` and there is no hole::

        exp(softcap(scale * Σ_d weight_d φ(query_id, key_jd)) + bias_ij - logsumexp_i)

    and 0 elsewhere. φ is one of `Pairwise`; `softcap(s)` is `softcap * tanh(s / softcap)`, or s where there is none; a
    sink is one more term of the sum in `logsumexp`.

    Attributes:
        name: where the call was made, such as `"encoder.layer.0.attention.self"`.
        kind: `"self"` or `"cross"`.
        query: (H, Lq, D) float32, after the model's rotations.
        key: (Hk, Lk, D) float32. Hk divides H: head h uses key head `h // (H // Hk)`.
        scale: the factor on the sum.
        softcap: bounds the scaled score, or None.
        start: (H or 1, Lq) int32, the first key each query may see.
        stop: (H or 1, Lq) int32, one past the last key each query may see.
        bias: added after the softcap, or None.
        logsumexp: (H, Lq), over keys and sink; -inf for a query that sees nothing, whose weights are all 0.
        entropy: (H, Lq) in nats. Entropy, `received` and `distance` are of the weights divided by their sum.
        received: (H, Lk), the sum of the weights on each key over the queries.
        distance: (H, Lq), the mean distance between query and key in positions; None for cross attention.
        thumbnail: (H, <=32, <=32), for each cell of a coarse grid the largest product of a weight and the number of
            keys that its query may see; -1 where no pair is allowed.
        query_tokens: Lq strings.
        key_tokens: Lk strings.
        sinks: (H,) the sink's score of each head, or None.
        steps: name, formula and tree of each step that leads to a weight, see `why.py`; the page
            shows none where it is empty. `blind_steps`: the steps of a query that sees nothing.

        operand_steps: (H, D) and (Hk, D), of which query and key are whole multiples, see `operands.py`: these
            multiples are written. None writes float32.
        error: the largest measured difference of these weights from the call's; of more than 2^22 pairs, only
            evenly spaced queries are measured. None if the weights are the call's own.
        phi, weight: φ and (D,) float64, or None for ones.
        scores: (H, Lq, Lk) float32, of a score that has no φ, in place of scale, softcap and the sum; D is 0 then.
        holes: for each head, or once for all, the pairs inside the spans that are not allowed, bool; None for none.
        position: the position of query 0 among the keys, or None where it is not known.
        alone: whether log-sum-exps, entropies and distances follow from the shown positions. They do not where words
            see padding, or padding stands between words.
        seen: (H or 1, Lq) int32, where `alone` is false: how many keys each query may see, including padding.
        label, role: such as `"L3"`, and `"encoder"`, `"decoder"`, `"cross"`, or `"self"` where there is one stack; in
            the second of two recordings such as `"self, beside"`.
        numbers: each head's own number, where some are left out; None for 0, 1, ….
        measures: for each head, by measure: value, uniform attention's value, the key of the measure or None, and
            perhaps how many queries both are means over.
        pyramid: the largest and mean weights of cells, where a side is long.
        value_norms: (H, Lk), the length ‖v_j‖ of each key's value vector, where values were kept.
        transformed_norms: (H, Lk), the length ‖v_j W_O‖ of what the head writes for each key, where W_O is known.
        slopes: the gradient of the output, where it was kept.
        answer: the first query that a model has generated, or None. `begins`: the first query of each step of a
            generation, or ().
        pairs: two features that rotary positions turn together, and the number of positions of a full turn, or None
            where it is not known.
    """

    name: str
    kind: str
    query: Array
    key: Array
    scale: float
    softcap: float | None
    start: Array
    stop: Array
    bias: PageBias | None
    logsumexp: Array
    entropy: Array
    received: Array
    distance: Array | None
    thumbnail: Array
    query_tokens: list[str]
    key_tokens: list[str]
    sinks: Array | None = None
    steps: tuple[dict[str, Any], ...] = ()
    blind_steps: tuple[dict[str, Any], ...] = ()
    operand_steps: tuple[Array, Array] | None = None
    error: float | None = None
    phi: Phi = "mul"
    weight: Array | None = None
    scores: Array | None = None
    holes: tuple[Tiles | None, ...] = ()
    position: int | None = None
    alone: bool = True
    seen: Array | None = None
    label: str = ""
    role: str = "self"
    numbers: tuple[int, ...] | None = None
    measures: tuple[Measures, ...] | None = None
    pyramid: Pyramid | None = None
    value_norms: Array | None = None
    transformed_norms: Array | None = None
    slopes: Slopes | None = None
    answer: int | None = None
    begins: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int, float | None], ...] = ()

    @property
    def heads(self) -> int:
        return int(self.query.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of queries and keys."""
        return int(self.query.shape[1]), int(self.key.shape[1])

    def key_head(self, head: int) -> int:
        """The key head that query head `head` uses."""
        return head // (self.heads // len(self.key))

    def allowed(self, head: int, first: int, last: int) -> Array:
        """The keys that the queries from `first` up to `last` may see, bool (last − first, Lk)."""
        places = np.arange(self.shape[1])
        start, stop = (of_head(edge, head)[first:last, None] for edge in (self.start, self.stop))
        inside: Array = (start <= places) & (places < stop)
        holes = _tiles_of(self.holes, head)
        if holes is not None:
            inside &= ~holes.rows(first, last, self.shape[1])
        if self.bias is not None:
            inside &= self.bias.rows(head, first, last, self.shape) != -np.inf
        return inside


class LeftOut(NamedTuple):
    """A call that the page does not show, and the reason in one sentence."""

    name: str
    reason: str


def of_head(array: Array, head: int) -> Array:
    """Row `head` of an array whose first dimension is all heads, or 1 where all heads are the same."""
    return np.ascontiguousarray(array[head if len(array) > 1 else 0])


def _tiles_of(every: tuple[Tiles | None, ...], head: int) -> Tiles | None:
    return every[head if len(every) > 1 else 0] if every else None


def of_heads(layer: Layer, heads: Sequence[int]) -> Layer:
    """The layer with these of its heads alone: they keep their numbers, and the name says which they are."""
    chosen = list(heads)

    def some(array: Array | None) -> Any:
        """The chosen heads of an array of all heads; an array of one row for all stays the same."""
        return array if array is None or len(array) == 1 != layer.heads else array[chosen]

    def each(parts: tuple[Any, ...]) -> tuple[Any, ...]:
        return parts if not parts or len(parts) == 1 != layer.heads else tuple(parts[head] for head in chosen)

    # every other array has a row for each head, or one for all
    others = {n: a for n, a in vars(layer).items() if isinstance(a, np.ndarray) and n not in ("key", "weight")}
    keys, steps, bias, pyramid = [layer.key_head(h) for h in chosen], layer.operand_steps, layer.bias, layer.pyramid
    numbers = layer.numbers or tuple(range(layer.heads))
    slopes = layer.slopes
    if slopes is not None:
        own = [head // (layer.heads // len(slopes.value)) for head in chosen]
        each_step = None if slopes.steps is None else (some(slopes.steps[0]), slopes.steps[1][own])
        slopes = Slopes(some(slopes.grad), slopes.value[own], each_step, some(slopes.raises), some(slopes.lowers))
    return replace(
        layer,
        name=f"{layer.name} (head{'s' * (len(chosen) > 1)} {', '.join(map(str, chosen))})",
        **{name: some(array) for name, array in others.items()},
        key=layer.key[keys],
        slopes=slopes,
        bias=None if bias is None else PageBias(some(bias.relative), some(bias.dense), each(bias.tiles)),
        holes=each(layer.holes),
        operand_steps=None if steps is None else (some(steps[0]), steps[1][keys]),
        numbers=tuple(numbers[head] for head in chosen),
        measures=None if layer.measures is None else tuple(layer.measures[head] for head in chosen),
        pyramid=None if pyramid is None else replace(pyramid, max=some(pyramid.max), mean=some(pyramid.mean)),
    )


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
