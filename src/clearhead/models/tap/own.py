"""The last source: clearhead's own attention, called by a model or by the modules of `clearhead.nn`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from clearhead import _attention
from clearhead._attention import Arguments, Attended, Ran
from clearhead.engines.base import Engine
from clearhead.models.tap.patch import replaced
from clearhead.models.tap.receiver import Changing, Receiver
from clearhead.models.tap.refused import uncompiled
from clearhead.problem.problem import Problem


@contextmanager
def source(receiver: Receiver, innermost: bool = False) -> Iterator[None]:
    """Give the problem as the engine is given it: an engine may compute it in pieces, by many calls."""
    given = _Given()

    def wrap(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noting(problem: Problem, engine: Engine, asked: Any = None) -> Tensor:
            if receiver.idle:
                return run(problem, engine, asked)
            assert given.call is not None
            after = receiver.own(problem, given.call, f"clearhead {engine.name}")
            output: Tensor = receiver.compute(after, run, problem, engine, asked)
            given.ran = after.ran if isinstance(after, Changing) else None
            return output

        return noting

    def outside(attended: Callable[[Arguments], Attended]) -> Callable[[Arguments], Attended]:
        def noted(call: Arguments) -> Attended:
            before = given.call, given.ran
            given.call, given.ran = call, None
            try:
                found = attended(call)
                return found if given.ran is None else found._replace(ran=given.ran)
            finally:
                given.call, given.ran = before

        eager = uncompiled(noted)

        def attend(call: Arguments) -> Attended:
            found: Attended = attended(call) if receiver.stack.innermost is None else eager(call)
            return found

        return attend

    with replaced(_attention, "run", wrap, innermost), replaced(_attention, "attend", outside, innermost):
        yield


class _Given(threading.local):
    """The arguments of attention() in this thread: the record has the score as given, over inputs not yet projected."""

    call: Arguments | None = None
    ran: Ran | None = None  # what an edit made of it
