"""Rules: a caller's functions of indices, evaluated on a part of the matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clearhead.base.arrays import is_dense, shown
from clearhead.base.errors import ClearheadError, ShapeError, UnsupportedError
from clearhead.base.kept import Memo
from clearhead.base.shapes import Sizes, broadcasts, extent
from clearhead.base.symbolic.fold import fold
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.user_functions.function_reads import FunctionReads
from clearhead.base.user_functions.single_pairs import call_rule

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class ByPair:
    """A function of four slices that gives a part of the matrix, with the same as a rule, `at`, of single pairs."""

    def __init__(
        self, part: Callable[[slice, slice, slice, slice], Tensor], at: Rule, of: tuple[Rule, ...] | None = None
    ) -> None:
        self.part, self.at = part, at
        self.of = (at,) if of is None else of  # the caller's rules
        self.memo = Memo()

    def __call__(self, *sides: slice) -> Tensor:
        return self.part(*sides)


class Joined:
    """A function of four slices that joins the results of others. Each of them is called once, however often it is
    used."""

    def __init__(self, join: Callable[..., Tensor], *inner: Callable[[slice, slice, slice, slice], Tensor]) -> None:
        self.join, self.inner = join, inner
        self.memo = Memo()

    def __call__(self, *sides: slice) -> Tensor:
        return self._fold(lambda leaf: leaf(*sides))

    def _fold(self, ask: Callable[[Any], Tensor]) -> Tensor:
        def make(part: Any, *found: Tensor) -> Tensor:
            return part.join(*found) if found else ask(part)

        return fold(self, _inner, make)

    def leaves(self) -> list[Any]:
        """The functions that it joins, each once."""
        found: list[Any] = []
        fold(self, _inner, lambda part, *inner: None if inner else found.append(part))
        return found

    def by_pair(self) -> ByPair | None:
        """The same by single pairs, where each of the functions is."""
        rules = {id(leaf): by_pair(leaf) for leaf in self.leaves()}
        known = [rule for rule in rules.values() if rule is not None]
        if len(known) < len(rules):
            return None
        pairs = {key: rule.at for key, rule in zip(rules, known, strict=True)}
        callers = tuple({id(caller): caller for rule in known for caller in rule.of}.values())
        found = ByPair(self, lambda *indices: self._fold(lambda leaf: pairs[id(leaf)](*indices)), callers)
        found.memo = self.memo
        return found


def _inner(function: Any) -> tuple[Any, ...]:
    return function.inner if isinstance(function, Joined) else ()


def by_pair(function: Any) -> ByPair | None:
    """The function, below its checks, where its rule of single pairs is known."""
    while isinstance(function, partial):
        function = function.args[0]
    if isinstance(function, Joined):
        return function.by_pair()
    return function if isinstance(function, ByPair) else None


def entry(tensor: Tensor, *indices: Tensor) -> Tensor:
    """One number of a tensor, whose dimensions of size 1 stand for all."""
    return tensor[tuple(i if size > 1 else i * 0 for i, size in zip(indices, tensor.shape, strict=True))]


def check_rule(fn: Any, reads: Any, who: str, instead: str) -> tuple[Rule, tuple[Tensor, ...]]:
    """A function of four indices, and the tensors that the caller says it reads."""
    if not callable(fn):
        raise ClearheadError(
            f"{who} takes a function of (batch, head, query_index, key_index); got a {type(fn).__name__}. {instead}"
        )
    return fn, check_tensors(reads, who)


def check_tensors(reads: Any, who: str) -> tuple[Tensor, ...]:
    """The tensors that the caller says a function reads."""
    if isinstance(reads, Tensor) or not all(isinstance(tensor, Tensor) for tensor in reads):
        raise ClearheadError(f"{who}: reads takes a list of the tensors that the function reads.")
    return tuple(reads)


def ask(
    fn: Rule, by_rows: bool | None, sides: Iterable[slice], sizes: Sizes, title: str, boolean: bool = False
) -> Tensor:
    """A rule's result for the part that four slices name. `by_rows`: see `call_rule`. `boolean`: see `as_part`."""
    extents = (extent(side, size) for size, side in zip(sizes.shape, sides, strict=True))
    indices = indices_of(extents, sizes.device)
    try:
        found = call_rule(fn, by_rows, *indices)
    except UnsupportedError:  # it says what to write
        raise
    except Exception as error:
        raise ClearheadError(
            f"{title} failed on {[tuple(index.shape) for index in indices]}: {type(error).__name__}: {error}\n"
            "It is called with four index tensors, (batch, head, query_index, key_index), and computes with them as "
            "they come: join conditions with & and |, not with and, or."
        ) from error
    return as_part(found, [index.numel() for index in indices], sizes.device, title, boolean)


def indices_of(extents: Iterable[tuple[int, int, int]], device: torch.device) -> list[Tensor]:
    """The indices of a part of the matrix, given start, stop and step of each side: int64, each along its dimension."""
    every = (torch.arange(*one, device=device) for one in extents)
    return [index.view((1,) * dim + (-1,) + (1,) * (3 - dim)) for dim, index in enumerate(every)]


def as_part(found: Any, shape: Sequence[int], device: torch.device, title: str, boolean: bool = False) -> Tensor:
    """A function's result for a part of the matrix, in four dimensions, each of the part's size or 1.

    `boolean`: whether it says which pairs are allowed; else it gives numbers. `title`: names the function in errors.
    """
    fits = is_dense(found) and found.ndim <= 4 and found.device == device and broadcasts(found.shape, shape)
    if not fits or not (found.dtype == torch.bool if boolean else found.is_floating_point()):
        numbers = "floating-point numbers (for who may attend to whom use MaskFunction)"
        raise ShapeError(
            f"{title} gave {shown(found)}; expected {'bool, True where a query may attend,' if boolean else numbers} "
            f"on {device}, of a shape that broadcasts to {tuple(shape)}, the (batch, heads, queries, keys) it was "
            "asked about: compute with the indices as they come."
        )
    part: Tensor = found if found.ndim == 4 else found.reshape((1,) * (4 - found.ndim) + tuple(found.shape))
    return part


def reads_of(fn: Rule, reads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors that a rule reads: those given as `reads`, and those found by the names in its code."""
    return reads if get_mode().compiled else (*reads, *FunctionReads(fn).tensors)


def title_of(who: str, fn: Rule) -> str:
    return f"{who}({getattr(fn, '__name__', type(fn).__name__)})"
