"""A problem as the kernels read it: named tuples of tensors with strides, and constants, which Triton compiles.

None is a constant of the kernel, whose code then has no part for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class View(NamedTuple):
    """A (B, H, L, D) tensor with its strides, 0 where it repeats; a (B, H, L) tensor has no `d`."""

    at: Tensor
    b: int
    h: int
    l: int  # noqa: E741
    d: int = 0


class Side(NamedTuple):
    """The queries or the keys."""

    view: View
    length: int
    heads: int
    poison: View | None = None  # (B, heads, length), float32: NaN for the rows that are not finite, 0 for others
    odd: Tensor | None = None  # the number of rows that are not finite; None: unknown
    laid: Tensor | None = None  # (B · heads, wide, padded), float32: the layout by dimension; e^2x if the φ reads it
    reach: Tensor | None = None  # (B · heads, blocks): the largest |x| of each block
    padded: int = 0
    blocks: int = 0


class Spans(NamedTuple):
    """A mask's spans, and their gaps; GAPS is the number of gaps."""

    start: View
    stop: View
    gap_start: View | None
    gap_stop: View | None
    GAPS: Any


class Ranges(NamedTuple):
    """The key blocks of each block of queries: see `ranges.py`."""

    of_queries: View


class Dropout(NamedTuple):
    """Dropout's seed, the least hash that is kept, the factor of kept weights, and the first indices of the part."""

    seed: Tensor
    limit: int
    factor: float
    batch: int
    head: int
    query: int
    key: int


class Shape(NamedTuple):
    """The constants of a kernel. Blocks and widths are powers of two."""

    PHI: Any  # see score.py
    QUERIES: Any
    KEYS: Any
    RANGES: Any  # ranges of key blocks for a block of queries
    WIDTH: Any
    VALUES: Any
    TOP: Any
    PRODUCTS: Any  # tf32 products for one float32 product
    BACKEND: Any  # see numbers.py


class Given(NamedTuple):
    """One problem."""

    query: Side
    key: Side
    value: View | None
    weight: Tensor | None  # (wide,), float32
    sums: Tensor | None  # Σ w and Σ |w|
    spans: Spans | None
    ranges: Ranges | None
    dense: View | None
    relative: View | None
    sinks: Tensor | None
    sinks_apart: int
    dropout: Dropout | None
    groups: int  # query heads for each key head
    width: int
    wide: int  # the width, rounded up to a multiple of four
    columns: int  # the columns of the value
    scale: float
    softcap: float | None
    shift: float  # terms of the softmax are multiplied by 2^−shift, and unshift is 2^shift
    unshift: float
    shape: Shape


class Rows(NamedTuple):
    """The numbers of each query that the backward pass and sums over queries read."""

    maximum: View
    log_sum: View
    delta: View | None = None


class Parts(NamedTuple):
    """The results of a forward pass; None for a result that is not wanted."""

    output: Tensor | None = None
    maximum: Tensor | None = None
    log_sum: Tensor | None = None
    entropy: Tensor | None = None
    position: View | None = None
    distance: Tensor | None = None
    best: Tensor | None = None
    best_key: Tensor | None = None
    largest: Tensor | None = None
    indices: Tensor | None = None
    scores: Tensor | None = None
    number: int = 0  # the number of largest weights


class Back(NamedTuple):
    """The gradients that statistics send back, and the numbers of `Rows`: see `Sent`.

    One number for each query is a column of `numbers`, float32, or of `places`, int32; the index of the column is a
    constant, None if there is none. With a tensor for each, the addresses alone would need more registers than a thread
    has.
    """

    numbers: View
    places: View | None
    maximum: Any
    log_sum: Any
    delta: Any
    log_weight: Any
    distance: Any
    best: Any
    factors: Any
    position: Any
    best_key: Any
    weights: View | None  # the `values` of `Sent`: a tuple in Triton has an attribute `values`
    indices: View | None
    received: View | None
    mean: View | None
    tall: int
    wide: int
    number: int  # the number of largest weights


def view(tensor: Tensor | None, *shape: int) -> View | None:
    """Return a tensor that broadcasts to (B, H, L) or (B, H, L, D) as the kernels read it; None for None."""
    return None if tensor is None else viewed(tensor, *shape)


def viewed(tensor: Tensor, *shape: int) -> View:
    """Return a tensor as the kernels read it; its first dimensions broadcast to `shape`, if there is one."""
    strides = tensor.stride()
    for place, (size, want) in enumerate(zip(tensor.shape, shape, strict=False)):
        if size != want:
            strides = (*strides[:place], 0, *strides[place + 1 :])
    return View(tensor, *strides[:4])
