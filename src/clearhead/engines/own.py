"""The wrapper of a user-defined engine, which checks its results before anything reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.engines.base import Engine
from clearhead.problem.checked import check_result
from clearhead.problem.packing import Operands, operands
from clearhead.problem.partial import Partial, Rows
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Found, Sent, Summary

Result = TypeVar("Result")


def _asked(method: str) -> Callable[..., Any]:
    """Return a method that calls the engine's method of this name."""
    return lambda self, *given: getattr(self.engine, method)(*given)


class Own(Engine):
    """A user-defined engine with checked results: types, shapes and devices, in O(1).

    Args:
        engine: The user's engine.
    """

    name = "own"

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.name = engine.name  # type: ignore[misc]

    objections, reservations, notes = map(_asked, ("objections", "reservations", "notes"))
    cost, transparent, walk, fuses, guarded = map(_asked, ("cost", "transparent", "walk", "fuses", "guarded"))

    def forward(self, problem: Problem, rows: bool = False) -> Partial:
        found, value, lead = self.engine.forward(problem, rows), problem.value, problem.sizes.shape[:3]
        assert value is not None
        shapes = {"output": (*lead, value.shape[-1]), "maximum": lead, "log_sum": lead}
        return self._check(found, Partial, shapes, problem, "forward")

    def backward(
        self, problem: Problem, rows: Rows, grad: Tensor | None, wanted: tuple[bool, ...], sent: Sent | None = None
    ) -> Operands:
        # pass `sent` only if there is one: the backward of an engine that fuses nothing need not have the parameter
        more = () if sent is None else (sent,)
        found = self.engine.backward(problem, rows, grad, wanted, *more)
        of = zip(Operands._fields, operands(problem), strict=True)
        shapes = {name: tuple(tensor.shape) for name, tensor in of if tensor is not None}
        self._check(found, Operands, shapes, problem, "backward")
        missing = [n for n, g, want in zip(Operands._fields, found, wanted, strict=True) if want and g is None]
        if missing and missing != ["sinks"]:
            raise ClearheadError(f"{self._who('backward')} gave no gradient of {missing[0]}, which is wanted.")
        return found

    def scores(self, problem: Problem) -> Tensor:
        found = self.engine.scores(problem)
        check_result(found, "scores", problem.sizes.shape, problem, self._who("scores"))
        return found

    def summarise(self, problem: Problem, summary: Summary) -> Found:
        found = self.engine.summarise(problem, summary)
        return self._check(found, Found, summary.shapes(problem), problem, "summarise")

    def contributions(
        self, problem: Problem, rows: Rows, grad: Tensor | None, sent: Sent | None, by_key: bool, positive: bool = False
    ) -> Tensor:
        found = self.engine.contributions(problem, rows, grad, sent, by_key, positive)
        batch, heads, queries, keys = problem.sizes.shape
        name, length = ("sums by key", keys) if by_key else ("sums by query", queries)
        check_result(found, name, (batch, heads, length), problem, self._who("contributions"))
        return found

    def _who(self, method: str) -> str:
        return f"the engine {self.name!r}, {type(self.engine).__name__}.{method},"

    def _check(self, found: Any, kind: type[Result], shapes: dict[str, Any], problem: Problem, method: str) -> Result:
        """Raise unless the result is of this kind, and its tensors have these shapes."""
        if not isinstance(found, kind):
            raise ClearheadError(f"{self._who(method)} gave a {type(found).__name__}; expected a {kind.__name__}.")
        for name, shape in shapes.items():
            tensor = getattr(found, name)
            if tensor is not None or name == "output":
                name = f"the gradient of {name}" if method == "backward" else name
                check_result(tensor, name, shape, problem, self._who(method))
        return found
