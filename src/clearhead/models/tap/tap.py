"""All sources of calls at once; the last one is clearhead's own attention."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from clearhead import _attention
from clearhead._attention import Arguments, Attended, Ran, attended_padded
from clearhead.engines.base import Engine
from clearhead.models.tap import functions
from clearhead.models.tap.interface import Given, subscribed
from clearhead.models.tap.patch import replaced
from clearhead.models.tap.receiver import Changing, Receiver
from clearhead.models.tap.refused import uncompiled
from clearhead.problem.problem import Problem


@contextmanager
def given_calls(receiver: Receiver, innermost: bool = False) -> Iterator[None]:
    """The receiver is given each attention call of its model inside the `with`.

    Of several receivers, the later one sees a call first and its result last. With `innermost` the receiver sees a
    call after all others, and its result before them.
    """
    with ExitStack() as stack:
        # this is entered first: code that the compiler makes of it would keep the others alive
        stack.enter_context(functions.source(receiver, innermost))
        stack.enter_context(receiver.stack.entered())
        stack.enter_context(subscribed(Given(receiver), innermost))
        stack.enter_context(own_source(receiver, innermost))
        yield


@contextmanager
def own_source(receiver: Receiver, innermost: bool = False) -> Iterator[None]:
    """Give each call of clearhead's own attention to the receiver: by a model or by a module of `clearhead.nn`.

    The receiver is given the problem that the engine is given: an engine may compute it in pieces, by many calls.
    """
    given = _Given()

    def wrap(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noting(problem: Problem, engine: Engine, asked: Any = None) -> Tensor:
            if receiver.idle:
                return run(problem, engine, asked)
            after, call = None, given.call
            if call is not None:  # else the call had begun, in another thread, before the receiver came
                after = receiver.read(lambda: receiver.own(problem, call, f"clearhead {engine.name}"))
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

        def as_batch(call: Arguments) -> Attended:
            return noted(call) if receiver.idle else attended_padded(call, noted)

        eager = uncompiled(as_batch)

        def attend(call: Arguments) -> Attended:
            found: Attended = attended(call) if receiver.stack.innermost is None else eager(call)
            return found

        return attend

    with replaced(_attention, "run", wrap, innermost), replaced(_attention, "attend", outside, innermost):
        yield


class _Given(threading.local):
    """The arguments of attention() in this thread. The record has their score: the problem's score is lowered, and its
    inputs are projected already."""

    call: Arguments | None = None
    ran: Ran | None = None  # how an edit changed the call
