"""Any number of reductions, in as few passes over the weights as they need."""

from __future__ import annotations

from typing import Any

import torch

from clearhead.base.torch_state.contexts import without_autocast
from clearhead.engines.base import Engine
from clearhead.engines.summarised import summarised
from clearhead.engines.tiled.statistics import looks
from clearhead.inspection.reductions.base import Reduction
from clearhead.problem.checked import checked_from
from clearhead.problem.guard import guard
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Summary


def stream(problem: Problem, engine: Engine, reductions: tuple[Reduction[Any], ...]) -> tuple[Any, ...]:
    """The results of all reductions. Statistics that go together share a pass, and so do looks at blocks."""
    results: dict[int, Any] = {}
    with without_autocast(problem.sizes.device):
        for reduction in reductions:
            reduction.check(problem)
        meant = [_meant(reduction, problem) for reduction in reductions]
        summaries = [r.summary(p) for r, p in zip(reductions, meant, strict=True)]
        own = _looking(problem, engine, {i: r for i, r in enumerate(reductions) if summaries[i] is None})
        for mine, summary, places in _passes(engine, meant, summaries):
            found = summarised(mine, engine, summary)
            results |= {i: reductions[i].found(found, mine) for i in places}
        return tuple((results | own)[i] for i in range(len(reductions)))


def _meant(reduction: Reduction[Any], problem: Problem) -> Problem:
    """The problem whose weights a reduction reads."""
    found = reduction.of(problem)
    return found if found is problem else checked_from(reduction, found, "of")


def _passes(
    engine: Engine, problems: list[Problem], summaries: list[Summary | None]
) -> list[tuple[Problem, Summary, list[int]]]:
    """The passes over the weights: each of a problem, with the summaries that go together in it, and their places."""
    passes: list[tuple[Problem, Summary, list[int]]] = []
    for i, (problem, summary) in enumerate(zip(problems, summaries, strict=True)):
        if summary is None:
            continue
        for at, (mine, own, places) in enumerate(passes):
            both = own.with_also(summary)
            alike = (mine.sinks is None, mine.origin) == (problem.sinks is None, problem.origin)
            # a statistic without a fused pass would keep the others from theirs
            if alike and both is not None and len({engine.fuses(mine, one) for one in (own, summary, both)}) == 1:
                passes[at] = (problem if mine.value is None else mine), both, [*places, i]
                break
        else:
            passes.append((problem, summary, [i]))
    return passes


@torch.no_grad()
def _looking(problem: Problem, engine: Engine, reductions: dict[int, Reduction[Any]]) -> dict[int, Any]:
    """The results of the reductions that look at blocks themselves, by their place."""
    begun: dict[int, Any] = {i: reduction.begin(problem) for i, reduction in reductions.items()}
    if begun:
        guarded = guard(problem)
        for look in looks(guarded, list(engine.walk(guarded)), engine.scores):
            for i, buffers in begun.items():
                reductions[i].look(buffers, look)
    return {i: reductions[i].end(buffers, problem) for i, buffers in begun.items()}
