"""The last source: clearhead's own attention, called by a model or by the modules of `clearhead.nn`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor

from clearhead import _attention
from clearhead.biases.base import Added, Bias
from clearhead.biases.dense import DenseBias
from clearhead.biases.distance import DistanceBias
from clearhead.engines.base import Engine
from clearhead.masks.base import Mask, Spans
from clearhead.masks.dense import DenseMask
from clearhead.masks.intervals import Intervals
from clearhead.models._compiled import uncompiled
from clearhead.models._masks import Recorded
from clearhead.models._patch import replaced
from clearhead.models.recorder import Recorder
from clearhead.problem.problem import Problem
from clearhead.scores.base import Score
from clearhead.scores.dot import Dot

EVERY = (slice(None),) * 4


@contextmanager
def source(recorder: Recorder) -> Iterator[None]:
    """Record the problem as the engine is given it: an engine may compute it in pieces, by many calls."""

    def wrap(choose: Callable[..., Engine]) -> Callable[..., Engine]:
        def chosen(problem: Problem, engine: Any) -> Engine:
            found = choose(problem, engine)
            return found if recorder.idle else _recording(recorder, found)

        return chosen

    def outside(attend: Callable[..., Any]) -> Callable[..., Any]:
        eager = uncompiled(attend)

        def _attend(*args: Any) -> Any:
            return attend(*args) if recorder.stack.innermost is None else eager(*args)

        return _attend

    with replaced(_attention, "choose", wrap), replaced(_attention, "_attend", outside):
        yield


def _recording(recorder: Recorder, engine: Engine) -> Engine:
    def run(problem: Problem) -> Tensor:
        _read(recorder, problem, f"clearhead {engine.name}")
        with recorder.inside():
            return engine.run(problem)

    one = copy(engine)
    object.__setattr__(one, "run", run)
    return one


def _read(recorder: Recorder, problem: Problem, backend: str) -> None:
    masks = Recorded()
    if problem.spans is not None:
        masks = Recorded(_mask(problem, problem.spans))
    bias = None if problem.bias is None else _bias(problem.bias)
    low = problem.lowered
    if low is not None and low.phi == "mul" and low.weight is None:
        score: Score = Dot(low.scale, low.softcap, None if low.sinks is None else low.sinks.detach())
        query, key = low.query, low.key
    else:
        score, query, key = deepcopy(problem.score), problem.query, problem.key
    recorder.record(query, key, masks=masks, bias=bias, backend=backend, score=score)


def _bias(added: Added) -> Bias:
    dense, relative = (None if t is None else t.detach().clone() for t in added)
    if relative is None:
        return DenseBias(dense)
    return DistanceBias(relative) if dense is None else DistanceBias(relative) + DenseBias(dense)


def _mask(problem: Problem, spans: Spans) -> Mask:
    if spans.residual is not None:
        return DenseMask(spans.keep(*EVERY, problem.sizes.keys).clone())
    # of one shape; the sums are copies
    return Intervals(spans.start + torch.zeros_like(spans.stop), spans.stop + torch.zeros_like(spans.start))
