"""The base class of reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Literal, Never, cast

from torch import Tensor
from typing_extensions import TypeVar

from clearhead.base.arrays import Array
from clearhead.base.output.text import outlined
from clearhead.engines.tiled.look import Look
from clearhead.problem.problem import Problem
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


def columns_of(reductions: Sequence[Reduction[Any]]) -> list[str]:
    """The headers of reductions in a table: the names of their classes, with units; equal ones have numbers behind."""
    found: list[str] = []
    for one in reductions:
        name = type(one).__name__ + f" ({one.unit})" * bool(one.unit)
        found.append(name if name not in found else f"{name} {len(found)}")
    return found
