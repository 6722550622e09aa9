"""Where weights get their problem: from what a person gave, or from the record of a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead._attention import Arguments
from clearhead.base.tracing import transformed
from clearhead.base.versions import Versions
from clearhead.masks.base import Mask
from clearhead.problem.problem import ABSENT, Problem, with_value
from clearhead.problem.reads import tensors_in
from clearhead.problem.record import Record, check_reads


class Source(ABC):
    """What a lazy matrix is made of.

    `numpy`: whether its results are arrays. `detached`: whether they have no gradients, whatever functions read.
    """

    numpy: bool = False
    detached: bool = False

    @abstractmethod
    def problem(self) -> Problem:
        """The normal form as it is now: the same object as long as nothing has changed. Raises where it is lost."""

    @abstractmethod
    def with_value(self, value: Any) -> Problem:
        """The same with a value, for the output."""

    @abstractmethod
    def said(self) -> dict[str, Any]:
        """What `repr` says of it, by the names of `weights`."""


class Given(Source):
    """What a person gave, lowered when it is first looked at, and again where that would give something else.

    `lasting`: of a call that is over: a write since is an error.
    """

    def __init__(self, call: Arguments, lasting: bool = False) -> None:
        self.numpy = isinstance(call.query, np.ndarray)
        # writes to NumPy arrays cannot be seen
        arrays: dict[str, Any] = {name: a.copy() for name, a in call._asdict().items() if isinstance(a, np.ndarray)}
        self._call = call._replace(**arrays)._replace(value=ABSENT, dropout_p=0.0)
        self._problem: Problem | None = None
        self._learnt = False
        self._versions = Versions(self._named())
        self._lasting = lasting

    def problem(self) -> Problem:
        if self._lasting:
            check_reads(self._versions)
        if self._problem is None or not self._may_be_used_again():
            self._versions = Versions(self._named())
            self._problem = self._call.problem()
            reads = (tensor for _, tensor in self._named())
            self._learnt = self._problem.needs_grad or any(tensor.requires_grad for tensor in reads)
        return self._problem

    def with_value(self, value: Any) -> Problem:
        if self._lasting:
            check_reads(self._versions)
        return self._call._replace(value=value).problem()

    def said(self) -> dict[str, Any]:
        options = ("score", "mask", "bias", "scale", "sinks", "align")
        return {name: getattr(self._call, name) for name in options}

    def _may_be_used_again(self) -> bool:
        """Whether what was lowered before is what would be lowered now.

        A graph serves one backward pass, and what was made without one has no gradients: where these are wanted, each
        use makes its own; and so it does inside a transform, whose tensors end with it.
        """
        if transformed() or (self._learnt and torch.is_grad_enabled()):
            return False
        return self._versions.known and self._versions.same(tensor for _, tensor in self._named())

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for name in ("query", "key", "score", "mask", "bias", "sinks", "align"):
            yield from ((name, tensor) for tensor in tensors_in(getattr(self._call, name)))


class Recorded(Source):
    """The record of a call, and what to say of it: no tensors, which would hold their graph."""

    detached = True

    def __init__(self, record: Record, said: dict[str, Any], numpy: bool = False) -> None:
        self.record, self._said, self.numpy = record, said, numpy

    def problem(self) -> Problem:
        self.record.check()
        return self.record.problem

    def with_value(self, value: Any) -> Problem:
        return with_value(self.problem(), value)

    def said(self) -> dict[str, Any]:
        return self._said


def shown(value: Any) -> str:
    """What an argument was, in a few words."""
    if isinstance(value, Mask):
        return value.title()
    return f"<{value.dtype} {tuple(value.shape)}>" if hasattr(value, "shape") else str(value)
