"""The way in which all calls of a model are intercepted; the last source is clearhead's own attention."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor

from clearhead import _attention
from clearhead._attention import Arguments, Attended, Ran
from clearhead.engines.base import Engine
from clearhead.models.interception.functions import intercept_functions
from clearhead.models.interception.handler import ModelHandler
from clearhead.models.interception.intercepted_call import InterceptedCall
from clearhead.models.interception.interface import intercept_backends
from clearhead.models.interception.patch import replaced
from clearhead.models.interception.place import BY_HEAD
from clearhead.models.interception.refused import is_compiled_here, uncompiled
from clearhead.problem.padded import get_nested_edges, pad_arguments
from clearhead.problem.problem import Problem


@contextmanager
def intercept(handler: ModelHandler, innermost: bool = False, backends: bool = True) -> Iterator[None]:
    """The handler is given each attention call of its model inside the `with`: `before` it is computed, and `after`.

    Of several handlers, the later one sees a call first and its result last. With `innermost` the handler sees a call
    after all others, and its result before them. `backends`: whether calls of transformers' backends are intercepted.
    """
    calls = intercept_backends(lambda _: None if handler.idle else handler, innermost) if backends else nullcontext()
    # the functions come first: code that the compiler makes of them would keep the others alive
    with intercept_functions(handler, innermost), handler.stack.entered(), calls, intercept_own(handler, innermost):
        yield


@contextmanager
def intercept_own(handler: ModelHandler, innermost: bool = False) -> Iterator[None]:
    """Intercept each call of clearhead's own attention: by a model or by a module of `clearhead.nn`.

    The handler is given the problem that the engine is given: an engine may compute it in pieces, by many calls.
    """
    here = _Here()

    def wrap(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def intercepted(problem: Problem, engine: Engine, asked: Any = None) -> Tensor:
            if handler.idle:
                return run(problem, engine, asked)
            call, given = None, here.call
            if given is not None:  # else the call had begun, in another thread, before the handler came
                call = handler.begin(lambda: _read(problem, given, engine))
            with handler.inside:  # not `handler.compute`, to be one frame less for each call
                output = run(problem, engine, asked)
            if call is not None:
                output, here.ran = handler.after(call, output), call.ran
            return output

        return intercepted

    attends = replaced(_attention, "attend", lambda attend: _Attend(attend, handler, here), innermost)
    with replaced(_attention, "run", wrap, innermost), attends:
        yield


class _Attend:
    """`attend`, which keeps the arguments of each call for the handler."""

    def __init__(self, attend: Callable[[Arguments], Attended], handler: ModelHandler, here: _Here) -> None:
        self._attend, self._handler, self._here = attend, handler, here

    def __call__(self, call: Arguments) -> Attended:
        if self._handler.stack.innermost is None:
            return self._attend(call)
        if is_compiled_here():
            return uncompiled(_Attend.__call__)(self, call)
        if self._handler.idle:
            return self._attend(call)
        here, edges = self._here, get_nested_edges(call.mask)
        before = here.call, here.ran
        here.call, here.ran = pad_arguments(call), None  # the handler knows no packed rows
        try:
            found = self._attend(here.call)
            found = found if here.ran is None else found._replace(ran=here.ran)
        finally:
            here.call, here.ran = before
        return found if edges is None else found._replace(output=edges.queries.pack(found.output), padded=True)


class _Here(threading.local):
    """The arguments of attention() in this thread. The record has their score: the problem's score is lowered, and its
    inputs are projected already."""

    call: Arguments | None = None
    ran: Ran | None = None  # how an edit changed the call


def _read(problem: Problem, given: Arguments, engine: Engine) -> InterceptedCall:
    backend, dropout_p = f"clearhead {engine.name}", problem.dropout_p
    tensors = problem.query, problem.key, problem.value
    return InterceptedCall(*tensors, backend, place=BY_HEAD, dropout_p=dropout_p, problem=problem, arguments=given)
