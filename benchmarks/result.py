"""What a case gives, and how two are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.measure import interleaved


@dataclass(frozen=True)
class Result:
    """One line of the table. `value` is a ratio where `bar` is one; `times` are in milliseconds."""

    what: str
    value: float
    unit: str
    bar: str
    reached: bool
    times: dict[str, float]


def agree(got: Tensor, want: Tensor) -> None:
    """No figure for a wrong answer."""
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def times(seconds: dict[str, float]) -> dict[str, float]:
    return {name: value * 1e3 for name, value in seconds.items()}


def faster(what: str, bar: float, calls: dict[str, Callable[[], Tensor]], rounds: int) -> Result:
    """How many times faster the last call is than the first."""
    names = list(calls)
    agree(calls[names[-1]](), calls[names[0]]())
    seconds = interleaved(calls, rounds, 1)
    ratio = seconds[names[0]] / seconds[names[-1]]
    return Result(what, ratio, "× faster", f"≥ {bar}", ratio >= bar, times(seconds))


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]
