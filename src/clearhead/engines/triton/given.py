"""A problem as the kernels read it: tensors with their strides, and constants, in named tuples that Triton compiles.

What is None is a constant of the kernel, which then has no code for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class View(NamedTuple):
    """A (B, H, L, D) tensor, its strides 0 where it repeats; a (B, H, L) one has no `d`."""

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
    odd: Tensor | None = None  # how many rows are not finite; None: there may be some
    laid: Tensor | None = None  # (B · heads, wide, padded), float32: by dimension; e^2x where a φ reads it
    reach: Tensor | None = None  # (B · heads, blocks): the largest |x| of each block
    padded: int = 0
    blocks: int = 0


class Spans(NamedTuple):
    """A mask's spans, and the gaps in them, of which there are GAPS."""

    start: View
    stop: View
    gap_start: View | None
    gap_stop: View | None
    GAPS: Any


class Ranges(NamedTuple):
    """The key blocks that each block of queries sees: see `ranges.py`."""

    of_queries: View


class Dropout(NamedTuple):
    """Dropout's seed, the least hash that is kept, what is kept is multiplied by, and where the part begins."""

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
    RANGES: Any  # of key blocks, to a block of queries
    WIDTH: Any
    VALUES: Any
    TOP: Any
    PRODUCTS: Any  # how many products in tf32 make one of float32
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
    groups: int  # query heads to a key head
    width: int
    wide: int  # the width up to a multiple of four
    columns: int  # of the value
    scale: float
    softcap: float | None
    shift: float  # terms of the softmax are 2^−shift of themselves, and unshift is 2^shift
    unshift: float
    shape: Shape


class Rows(NamedTuple):
    """What the backward pass and sums over queries know of each query."""

    maximum: View
    log_sum: View
    delta: View | None = None


class Parts(NamedTuple):
    """Where a forward pass writes; None is not wanted."""

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
    number: int = 0  # of the largest weights


class Back(NamedTuple):
    """What statistics send back, and what `Rows` holds: see `Sent`.

    One number a query is a column of `numbers`, float32, or of `places`, int32; which column is a constant, None where
    there is none. With a tensor for each, their addresses alone took more registers than a thread has.
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
    weights: View | None  # the `values` of `Sent`: a tuple in Triton has values of its own
    indices: View | None
    received: View | None
    mean: View | None
    tall: int
    wide: int
    number: int  # of the largest weights


def view(tensor: Tensor | None, *shape: int) -> View | None:
    """A tensor that broadcasts to (B, H, L) or (B, H, L, D) as the kernels read it."""
    return None if tensor is None else viewed(tensor, *shape)


def viewed(tensor: Tensor, *shape: int) -> View:
    """The same of a tensor whose first dimensions broadcast to this shape; without a shape, of the tensor as it is."""
    strides = tensor.stride()
    for place, (size, want) in enumerate(zip(tensor.shape, shape, strict=False)):
        if size != want:
            strides = (*strides[:place], 0, *strides[place + 1 :])
    return View(tensor, *strides[:4])
