"""The base class of reductions, and how they choose queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Literal, Never, cast

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypeVar

from clearhead.base.arrays import Array, check_float, to_tensor
from clearhead.base.errors import ClearheadError, ShapeError, columns
from clearhead.base.shapes import Sizes, broadcasts, placed
from clearhead.base.text import outlined
from clearhead.engines.tiled.look import Look
from clearhead.problem.problem import Problem
from clearhead.problem.region import Region
from clearhead.problem.regions import cut
from clearhead.problem.summary import Found, Summary

Queries = slice | Array | None  # a slice of the queries, or a weight for each query
Result = TypeVar("Result", covariant=True, default=Tensor)  # of a reduction


class Reduction(Generic[Result]):
    """A summary of the weights that one pass over their rows can build up. A subclass has one of two forms.

    >>> import torch, clearhead as ch
    >>> class Seen(ch.extend.Reduction):             # how many keys get more than a hundredth of a query's weight
    ...     along = "queries"
    ...     def begin(self, problem):
    ...         return torch.zeros(problem.sizes.shape[:3])
    ...     def look(self, buffers, look):
    ...         buffers[look.at] = (look.weights > 0.01).sum(-1).float()
    >>> ch.weights(torch.zeros(2, 4), torch.zeros(5, 4)).reduce(Seen())
    tensor([5., 5.])

    `summary` names statistics that engines compute, and `found` makes the result of them, which is differentiable where
    they are. Or `begin` makes buffers, `look` adds one block of rows to them, and `end` gives the result, without
    gradients. Results are tensors that begin with (B, H). `along`: whether dimension 2 of a result counts queries or
    keys; None for neither. `gives`: the statistic that is the result; or `found` makes another one of several. `unit`:
    of the result, such as "nats", for the header of a table.
    """

    along: ClassVar[Literal["queries", "keys"] | None] = None
    gives: ClassVar[str] = ""
    unit: ClassVar[str] = ""

    def __repr__(self) -> str:
        return outlined(self)

    def check(self, problem: Problem) -> None:
        """Raise where this cannot be computed for the weights of this problem."""

    def of(self, problem: Problem) -> Problem:
        """The problem whose weights are reduced, perhaps without sinks, or of some queries alone."""
        return problem

    def summary(self, problem: Problem) -> Summary | None:
        """The statistics that the result is made of; None where the reduction looks at blocks itself."""
        return None

    def found(self, found: Found, problem: Problem) -> Result:
        """The result, from these statistics."""
        if not self.gives:
            raise NotImplementedError(f"{type(self).__name__} has a summary(), and no found() or `gives`")
        return cast(Result, getattr(found, self.gives))

    def begin(self, problem: Problem) -> object:
        """The buffers, empty."""
        raise NotImplementedError(f"{type(self).__name__} has neither summary() nor begin(), look() and end()")

    def look(self, buffers: Never, look: Look) -> None:
        """Add one block to the buffers."""
        raise NotImplementedError

    def end(self, buffers: Never, problem: Problem) -> Result:
        """The result from the buffers."""
        return cast(Result, buffers)


def over_keys(problem: Problem) -> Problem:
    """The problem without sinks, whose weights are the weights of the keys divided by their sum."""
    return problem if problem.sinks is None else problem._replace(sinks=None, value=None)


def of_queries(problem: Problem, queries: Queries) -> Problem:
    """The problem of some queries, where `queries` is a slice."""
    every = range(problem.sizes.queries)
    if not isinstance(queries, slice) or every[queries] == every:
        return problem
    return cut(problem._replace(value=None), Region(queries=queries))


def check_queries(queries: Queries, problem: Problem, who: str) -> None:
    """Raise where `queries` is no slice that goes forward, and no weight for each query."""
    if isinstance(queries, slice):
        parts = (queries.start, queries.stop, queries.step)
        wrong = any(not isinstance(p, int | np.integer | None) or isinstance(p, bool) for p in parts)
        if wrong or (queries.step is not None and queries.step < 1):
            raise ClearheadError(f"{who}: queries is {queries}; expected a slice of whole numbers that goes forward.")
    elif queries is not None:
        factors(queries, problem.sizes, who)


def factors(queries: Queries, sizes: Sizes, who: str) -> Tensor | None:
    """A weight for each query, (B or 1, H or 1, Lq); None where there are none."""
    if queries is None or isinstance(queries, slice):
        return None
    given: Tensor = to_tensor(queries, "queries")
    check_float(given, "queries")
    shown = (*sizes.shown, sizes.queries)
    fits = given.ndim and given.ndim <= len(shown) and given.shape[-1] == sizes.queries
    if not fits or not broadcasts(given.shape, shown):
        raise ShapeError(
            f"{who}: queries has shape {tuple(given.shape)}; expected a slice, or a weight for each query, which "
            f"broadcasts to {shown}.\n" + columns({"queries": shown, "weights": tuple(given.shape)})
        )
    given = placed(given.detach(), sizes.device, f"{who}: queries").clone()  # for the backward pass
    if given.ndim == 1:
        return given.view(1, 1, -1)
    return given.expand(shown).reshape(*sizes.shape[:3])


def arange(length: int, device: torch.device) -> Tensor:
    """Whole numbers from 0 on, on this device, whatever the caller's default device is."""
    return torch.arange(length, device=device)


def columns_of(reductions: Sequence[Reduction[Any]]) -> list[str]:
    """The headers of reductions in a table: the names of their classes, with units; equal ones have numbers behind."""
    found: list[str] = []
    for one in reductions:
        name = type(one).__name__ + f" ({one.unit})" * bool(one.unit)
        found.append(name if name not in found else f"{name} {len(found)}")
    return found
