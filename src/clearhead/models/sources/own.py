"""The last source: clearhead's own attention, called by a model or by the modules of `clearhead.nn`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from clearhead import _attention
from clearhead._attention import Arguments
from clearhead.engines.base import Engine
from clearhead.masks.base import Mask, Spans
from clearhead.masks.dense import DenseMask
from clearhead.masks.intervals import Intervals
from clearhead.models._compiled import uncompiled
from clearhead.models._masks import Recorded
from clearhead.models._patch import replaced
from clearhead.models._recorded import recorded
from clearhead.models.recorder import Recorder
from clearhead.problem.problem import Problem, make_problem
from clearhead.scores.base import ByTile, Pairwise, Score
from clearhead.scores.dot import Dot

EVERY = (slice(None),) * 4


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

    def outside(attend: Callable[..., Any]) -> Callable[..., Any]:
        def noted(call: Arguments) -> Any:
            before, given.call = given.call, call
            try:
                return attend(call)
            finally:
                given.call = before

        eager = uncompiled(noted)

        def _attend(call: Arguments) -> Any:
            return attend(call) if recorder.stack.innermost is None else eager(call)

        return _attend

    with replaced(_attention, "run", wrap), replaced(_attention, "_attend", outside):
        yield


class _Given(threading.local):
    """What attention() was given, in this thread: the score is to be shown as it was, over inputs not yet projected."""

    call: Arguments | None = None


def _read(recorder: Recorder, problem: Problem, call: Arguments, backend: str) -> None:
    mask = None if problem.spans is None else _mask(problem, problem.spans)
    masks = Recorded(mask, align=problem.sizes.align)
    bias = None if problem.bias is None else recorded(problem.bias)
    scores = problem.scores
    if isinstance(scores, Pairwise) and scores.phi == "mul" and scores.weight is None:
        score: Score = Dot(scores.scale, scores.softcap)
        query, key, scale = scores.query, scores.key, None
    else:
        written = make_problem(
            call.query, call.key, call.value, score=call.score, scale=call.scale, as_written=True
        ).scores
        assert isinstance(written, ByTile)
        dtype = problem.query.dtype  # which autocast may have changed
        score, scale = deepcopy(written.score), call.scale
        query, key = written.query.to(dtype), written.key.to(dtype)
    recorder.record(query, key, masks=masks, bias=bias, backend=backend, score=score, scale=scale, sinks=problem.sinks)


def _mask(problem: Problem, spans: Spans) -> Mask:
    if spans.residual is not None:
        return DenseMask(spans.keep(*EVERY, problem.sizes.keys).clone())
    # of one shape; the sums are copies
    return Intervals(spans.start + torch.zeros_like(spans.stop), spans.stop + torch.zeros_like(spans.start))
