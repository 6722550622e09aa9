"""Rules: a caller's functions of indices, evaluated on a part of the matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.base.closures import read_by
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.shapes import Sizes, broadcasts, extent
from clearhead.base.tracing import compiling

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def check_rule(fn: Any, reads: Any, who: str, instead: str) -> tuple[Rule, tuple[Tensor, ...]]:
    """A function of four indices, and the tensors that the caller says it reads."""
    if not callable(fn):
        raise ClearheadError(
            f"{who} takes a function of (batch, head, query_index, key_index); got a {type(fn).__name__}. {instead}"
        )
    if isinstance(reads, Tensor) or not all(isinstance(tensor, Tensor) for tensor in reads):
        raise ClearheadError(f"{who}: reads takes a list of the tensors that the function reads.")
    return fn, tuple(reads)


def ask(fn: Rule, sides: Iterable[slice], sizes: Sizes, title: str, hint: str) -> tuple[Any, list[int]]:
    """A rule's result for the part that four slices name, and the shape of that part."""
    indices = []
    for dim, (size, side) in enumerate(zip(sizes.shape, sides, strict=True)):
        index = torch.arange(*extent(side, size), device=sizes.device)
        indices.append(index.view((1,) * dim + (-1,) + (1,) * (3 - dim)))
    try:
        found = fn(*indices)
    except Exception as error:
        raise ClearheadError(
            f"{title} failed on {[tuple(index.shape) for index in indices]}: {type(error).__name__}: {error}\n"
            f"It is called with four index tensors, (batch, head, query_index, key_index); {hint}"
        ) from error
    return found, [index.numel() for index in indices]


def broadcast(found: Tensor, shape: Sequence[int], title: str) -> Tensor:
    """A rule's result in four dimensions, each of the part's size or 1."""
    if found.ndim > 4 or not broadcasts(found.shape, shape):
        raise ShapeError(
            f"{title} gave a tensor of shape {tuple(found.shape)}, which does not broadcast to {tuple(shape)}, the "
            "(batch, heads, queries, keys) it was asked about: compute with the indices as they come."
        )
    return found.reshape((1,) * (4 - found.ndim) + tuple(found.shape))


def reads_of(fn: Rule, reads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors that a rule reads: those given as `reads`, and those found in its bytecode."""
    return reads if compiling() else (*reads, *read_by(fn))


def title_of(who: str, fn: Rule) -> str:
    return f"{who}({getattr(fn, '__name__', type(fn).__name__)})"
