"""The type of a module's call: that of its `forward`. PyTorch declares a call of anything that gives anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Forward = TypeVar("Forward", bound=Callable[..., object])


def as_forward(forward: Forward) -> Callable[[object], Forward]:
    """For type checkers alone: a decorator that gives a method the type of `forward`.

    It loses what a `forward` of tensors or of arrays gives for each: there the call is declared in full.
    """
    raise NotImplementedError
