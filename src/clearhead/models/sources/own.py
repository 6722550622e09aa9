"""The last source: clearhead's own attention, called by a model or by the modules of `clearhead.nn`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import Tensor

from clearhead import _attention
from clearhead._attention import Arguments
from clearhead.engines.base import Engine
from clearhead.masks.base import Mask
from clearhead.models._compiled import uncompiled
from clearhead.models._patch import replaced
from clearhead.models._recorded import RecordedMask
from clearhead.models.recorder import Recorder
from clearhead.problem.problem import Problem, as_score, make_problem
from clearhead.problem.reads import tensors_in
from clearhead.problem.record import frozen, record
from clearhead.scores.base import ByTile
from clearhead.scores.dot import Dot


@contextmanager
def source(recorder: Recorder) -> Iterator[None]:
    """Record the problem as the engine is given it: an engine may compute it in pieces, by many calls."""
    given = _Given()

    def wrap(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noting(problem: Problem, engine: Engine, asked: Any = None) -> Tensor:
            if recorder.idle:
                return run(problem, engine, asked)
            assert given.call is not None
            _read(recorder, problem, given.call, f"clearhead {engine.name}")
            with recorder.inside():
                return run(problem, engine, asked)

        return noting

    def outside(attended: Callable[..., Any]) -> Callable[..., Any]:
        def noted(call: Arguments) -> Any:
            before, given.call = given.call, call
            try:
                return attended(call)
            finally:
                given.call = before

        eager = uncompiled(noted)

        def attend(call: Arguments) -> Any:
            return attended(call) if recorder.stack.innermost is None else eager(call)

        return attend

    with replaced(_attention, "run", wrap), replaced(_attention, "attend", outside):
        yield


class _Given(threading.local):
    """The arguments of attention() in this thread: the record has the score as given, over inputs not yet projected."""

    call: Arguments | None = None


def _read(recorder: Recorder, problem: Problem, call: Arguments, backend: str) -> None:
    recorder.check(problem.query, problem.key)
    if not recorder.wants(None):
        return
    kept = record(problem._replace(sizes=problem.sizes._replace(leading=None)), copy=recorder.copies)
    scores, given = kept.problem.scores, as_score(call.score)
    query, key, score = scores.query, scores.key, given
    if not recorder.copies:
        return recorder.keep(kept, query, key, score, None, backend)
    if isinstance(scores, ByTile):
        score = scores.score
    elif isinstance(given, Dot):
        score = Dot(scores.scale, scores.softcap)
    else:  # the inputs of its projections, of the dtype that autocast gave them
        written = make_problem(call.query, call.key, call.value, score=given, scale=call.scale, as_written=True).scores
        query, key = (t.detach().to(problem.query.dtype, copy=True) for t in (written.query, written.key))
        score = frozen(given)
    recorder.keep(kept, query, key, score, _mask(call.mask, kept.problem), backend)


def _mask(given: Any, problem: Problem) -> Mask | None:
    """A copy of the mask that a person gave; its spans, where it holds a matrix. None where it is a bias alone."""
    if problem.spans is None:
        return None
    few = 4 * (problem.sizes.queries + problem.sizes.keys) * problem.sizes.batch
    if isinstance(given, Mask) and sum(tensor.numel() for tensor in tensors_in(given)) <= few:
        return deepcopy(given)
    return RecordedMask(problem.spans, problem.sizes)
