"""The sources of a lazy matrix's problem: the arguments of a call, and its record."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clearhead._attention import Arguments
from clearhead.base.errors import ClearheadError
from clearhead.base.output.text import said
from clearhead.base.torch_state.contexts import capture_autocast
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.modules import settled
from clearhead.base.torch_state.versions import Versions
from clearhead.masks.base import Mask
from clearhead.problem.checked import checked_from
from clearhead.problem.problem import ABSENT, Problem, with_value
from clearhead.problem.reads import tensors_in
from clearhead.problem.record import Record, check_reads, copied, record

_OF_EVERY_MODULE = vars(nn.Module()).keys()  # such as `training`


class Source(ABC):
    """The source of a lazy matrix's problem.

    `numpy`: whether its results are arrays. `detached`: whether they have no gradients, whatever functions read.
    """

    numpy: bool = False
    detached: bool = False

    @abstractmethod
    def problem(self) -> Problem:
        """The normal form as it is now: the same object as long as nothing has changed. Raises where it is lost."""

    def check(self) -> None:  # noqa: B027 - a source of live arguments loses nothing
        """Raise where the problem is lost: a tensor has been written to since the call."""

    def with_value(self, value: Any) -> Problem:
        """The problem with a value, for the output. Where it requires grad, tensors of inference mode are copied."""
        problem, needs_grad = self.problem(), torch.is_grad_enabled() and getattr(value, "requires_grad", False)
        # the compiler follows no `is_inference`
        if needs_grad and not problem.mode.compiled and problem.query.is_inference():
            problem = record(problem, copy=True).problem
        return with_value(problem, value)

    @abstractmethod
    def said(self) -> dict[str, Any]:
        """The arguments that `repr` shows, by their names in `weights`."""


class FromCall(Source):
    """The arguments of a call, lowered at their first use, and again where the result would be another problem.

    `lasting`: the call is over, and a later write to its tensors is an error.
    """

    def __init__(self, call: Arguments, lasting: bool = False) -> None:
        self.numpy = isinstance(call.query, np.ndarray)
        own: dict[str, Any] = {}  # copies of arguments that count no writes
        for name, argument in call._asdict().items():
            if isinstance(argument, np.ndarray):
                own[name] = argument.copy()
            elif lasting and isinstance(argument, Tensor) and argument.is_inference():
                own[name] = copied(argument)
            elif lasting and isinstance(argument, nn.Module):  # a score or a bias, whose hooks the call has run
                own[name] = settled(argument, inside=True)
        self._call = call._replace(**own)._replace(value=ABSENT, dropout_p=0.0)
        self._surroundings = capture_autocast(call.query.device) if lasting else nullcontext
        self._problem: Problem | None = None
        self._learnt = False
        self._versions, self._numbers = Versions(self._named()), settings(self._call.score)
        self._lasting = lasting

    def problem(self) -> Problem:
        self.check()
        if self._problem is None or not self._may_be_used_again():
            with self._surroundings():
                self._problem = self._call.problem()
            if not self._lasting:  # after it, since hooks of a score or a bias write to these
                self._versions, self._numbers = Versions(self._named()), settings(self._call.score)
            self._learnt = self._problem.needs_grad or any(tensor.requires_grad for _, tensor in self._named())
        return self._problem

    def with_value(self, value: Any) -> Problem:
        return with_value(self.problem(), value) if self._lasting else self._call._replace(value=value).problem()

    def __getstate__(self) -> dict[str, Any]:  # made again: it may hold functions that no pickle takes
        return self.__dict__ | {"_problem": None}

    def said(self) -> dict[str, Any]:
        options = ("score", "mask", "bias", "scale", "sinks", "align")
        return {name: getattr(self._call, name) for name in options}

    def check(self) -> None:
        if not self._lasting:
            return
        check_reads(self._versions, self._named())
        if self._numbers != settings(self._call.score):
            raise ClearheadError(
                "the score of the recorded call was given other settings since: its attention weights can't be "
                "computed any more. Read what you need of attention_weights before."
            )

    def _may_be_used_again(self) -> bool:
        """Whether lowering again would give the same problem.

        A graph serves one backward pass, and a problem made without one has no gradients: where gradients are needed,
        each use lowers again. Each use inside a transform does too, since tensors do not outlive the transform.
        """
        if get_mode().transforms or (self._learnt and torch.is_grad_enabled()):
            return False
        same = self._versions.known and self._versions.changed(self._named()) is None
        return same and self._numbers == settings(self._call.score)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for name in ("query", "key", "score", "mask", "bias", "sinks", "align"):
            yield from ((name, tensor) for tensor in tensors_in(getattr(self._call, name)))


def settings(score: Any) -> list[Any]:
    """The numbers, words and flags that a score computes with, such as its softcap, which may be set anew."""
    modules = score.modules() if isinstance(score, nn.Module) else ()
    return [
        (name, repr(value))  # as text, NaN equals itself
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str | None | np.generic) and name not in _OF_EVERY_MODULE
    ]


class FromRecord(Source):
    """The record of a call, and its arguments as text for `repr`: tensors would keep their graph alive."""

    detached = True

    def __init__(self, record: Record, said: dict[str, Any], numpy: bool = False) -> None:
        self.record, self._said, self.numpy = record, said, numpy

    def check(self) -> None:
        self.record.check()

    def problem(self) -> Problem:
        self.check()
        return self.record.problem

    def said(self) -> dict[str, Any]:
        return self._said


class DerivedSource(Source):
    """A source whose problem is made of another source's problem by `derive`."""

    def __init__(self, given: Source, derive: Callable[[Problem], Problem]) -> None:
        self.given, self.numpy, self.detached = given, given.numpy, given.detached
        self.derive = derive
        self._made: tuple[Problem, Problem] | None = None

    def check(self) -> None:
        self.given.check()

    def problem(self) -> Problem:
        problem = self.given.problem()
        if self._made is None or self._made[0] is not problem:
            self._made = problem, self.derive(checked_from(self.given, problem, "problem"))
        return self._made[1]

    def __getstate__(self) -> dict[str, Any]:  # made again: it may hold functions that no pickle takes
        return self.__dict__ | {"_made": None}

    def said(self) -> dict[str, Any]:
        return self.given.said()


def shown(value: Any) -> str:
    """An argument in a few words."""
    if isinstance(value, Mask):
        return said(value, value.title)
    return f"<{value.dtype} {tuple(value.shape)}>" if hasattr(value, "shape") else str(value)
