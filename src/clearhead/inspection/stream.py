"""The one streaming pass that serves any number of reductions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from clearhead.base.errors import UnsupportedError
from clearhead.base.tracing import vectorized, without_autocast
from clearhead.engines.base import Engine
from clearhead.engines.tiled.tiles import may_be_empty, sinks
from clearhead.inspection.reductions.base import Look, Reduction
from clearhead.problem.problem import Problem, guard
from clearhead.problem.regions import cut
from clearhead.problem.summary import Summary


@torch.no_grad()
def stream(problem: Problem, engine: Engine, reductions: tuple[Reduction, ...]) -> tuple[Any, ...]:
    """All the reductions: in the engine's fused pass where it has one for them, the others in one pass over tiles."""
    if vectorized():
        raise UnsupportedError(
            "reductions of weights write to buffers, which torch.func.vmap cannot follow. Give query and key a batch "
            "dimension, and reduce the weights of the whole batch."
        )
    with without_autocast(problem.sizes.device):
        for reduction in reductions:
            reduction.check(problem)
        results = _from_engine(problem, engine, reductions)
        begun = {i: r.begin(problem) for i, r in enumerate(reductions) if i not in results}
        if begun:
            for look in looks(problem, engine):
                for i, buffers in begun.items():
                    reductions[i].look(buffers, look)
        return tuple(results[i] if i in results else r.end(begun[i], problem) for i, r in enumerate(reductions))


def _from_engine(problem: Problem, engine: Engine, reductions: tuple[Reduction, ...]) -> dict[int, Any]:
    """The results of the engine's fused pass, by the place of their reduction."""
    wanted = Summary()
    places = []
    for i, reduction in enumerate(reductions):
        summary = reduction.summary(problem)
        both = None if summary is None else wanted.with_also(summary)
        if both is not None:
            wanted = both
            places.append(i)
    if not places:
        return {}
    found = engine.summarise(problem, wanted)
    return {} if found is None else {i: reductions[i].found(found, problem) for i in places}


def looks(problem: Problem, engine: Engine) -> Iterator[Look]:
    """The regions of the matrix, in turn. A `Look` overwrites its scores, so nothing else may use them."""
    problem = guard(problem)
    for region in engine.walk(problem):
        part = cut(problem, region)
        scores = engine.scores(part)
        own = scores.clone(memory_format=torch.contiguous_format) if problem.lowered is None else scores
        yield Look(region, own, may_be_empty(part), sinks(part))
