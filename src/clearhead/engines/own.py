"""The wrapper of an engine of one's own: its results are compared with the problem before anything reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.engines.base import Engine
from clearhead.problem.checked import check_result
from clearhead.problem.packing import Operands, operands
from clearhead.problem.partial import Partial, Rows
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Found, Sent, Summary


def _asked(method: str) -> Callable[..., Any]:
    """The engine's own method of this name."""
    return lambda self, *given: getattr(self.engine, method)(*given)


class Own(Engine):
    """The same engine with checked results: types, shapes and devices, in O(1)."""

    name = "own"

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.name = engine.name  # type: ignore[misc]

    objections, reservations, notes = map(_asked, ("objections", "reservations", "notes"))
    cost, transparent, walk, fuses, guarded = map(_asked, ("cost", "transparent", "walk", "fuses", "guarded"))

    def forward(self, problem: Problem, rows: bool = False) -> Partial:
        found, value = self.engine.forward(problem, rows), problem.value
        assert value is not None
        self._is(found, Partial, "forward")
        lead = problem.sizes.shape[:3]
        self._check(found.output, "an output", (*lead, value.shape[-1]), problem, "forward")
        for name, tensor in (("maximum", found.maximum), ("log_sum", found.log_sum)):
            if tensor is not None:
                self._check(tensor, name, lead, problem, "forward")
        return found

    def backward(
        self, problem: Problem, rows: Rows, grad: Tensor | None, wanted: tuple[bool, ...], sent: Sent | None = None
    ) -> Operands:
        # `sent` is passed only where it is given: an engine that fuses nothing need not take it
        more = () if sent is None else (sent,)
        found = self.engine.backward(problem, rows, grad, wanted, *more)
        self._is(found, Operands, "backward")
        for name, gradient, tensor in zip(Operands._fields, found, operands(problem), strict=True):
            if gradient is not None and tensor is not None:
                self._check(gradient, f"the gradient of {name}", tuple(tensor.shape), problem, "backward")
        missing = [n for n, g, want in zip(Operands._fields, found, wanted, strict=True) if want and g is None]
        if missing and missing != ["sinks"]:
            raise ClearheadError(f"{self._who('backward')} gave no gradient of {missing[0]}, which is wanted.")
        return found

    def scores(self, problem: Problem) -> Tensor:
        found = self.engine.scores(problem)
        self._check(found, "scores", problem.sizes.shape, problem, "scores")
        return found

    def summarise(self, problem: Problem, summary: Summary) -> Found:
        found = self.engine.summarise(problem, summary)
        self._is(found, Found, "summarise")
        for name, shape in summary.shapes(problem).items():
            tensor = getattr(found, name)
            if tensor is not None:
                self._check(tensor, name, shape, problem, "summarise")
        return found

    def contributions(
        self, problem: Problem, rows: Rows, grad: Tensor | None, sent: Sent | None, by_key: bool, positive: bool = False
    ) -> Tensor:
        found = self.engine.contributions(problem, rows, grad, sent, by_key, positive)
        batch, heads, queries, keys = problem.sizes.shape
        name, length = ("sums by key", keys) if by_key else ("sums by query", queries)
        self._check(found, name, (batch, heads, length), problem, "contributions")
        return found

    def _who(self, method: str) -> str:
        return f"the engine {self.name!r}, {type(self.engine).__name__}.{method},"

    def _is(self, found: Any, kind: type, method: str) -> None:
        if not isinstance(found, kind):
            raise ClearheadError(f"{self._who(method)} gave a {type(found).__name__}; expected a {kind.__name__}.")

    def _check(self, tensor: Any, name: str, shape: tuple[int, ...], problem: Problem, method: str) -> None:
        check_result(tensor, name, shape, problem, self._who(method))
