"""Any number of reductions, in as few passes over the weights as they need."""

from __future__ import annotations

from typing import Any

import torch

from clearhead.base.contexts import without_autocast
from clearhead.base.errors import UnsupportedError
from clearhead.engines.base import Engine
from clearhead.engines.summarised import summarised
from clearhead.engines.tiled.statistics import looks
from clearhead.inspection.reductions.base import Reduction
from clearhead.problem.checked import checked, ours
from clearhead.problem.guard import guard
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Summary


def stream(problem: Problem, engine: Engine, reductions: tuple[Reduction[Any], ...]) -> tuple[Any, ...]:
    """The results of all reductions. Statistics that go together share a pass, and so do looks at blocks."""
    if not problem.mode.eager and problem.mode.vectorized:
        raise UnsupportedError(
            "reductions of weights write to buffers, which torch.func.vmap cannot follow. Give query and key a batch "
            "dimension, and reduce the weights of the whole batch."
        )
    results: dict[int, Any] = {}
    with without_autocast(problem.sizes.device):
        for reduction in reductions:
            reduction.check(problem)
        meant = [_meant(reduction, problem) for reduction in reductions]
        summaries = [r.summary(p) for r, p in zip(reductions, meant, strict=True)]
        own = _looking(problem, engine, {i: r for i, r in enumerate(reductions) if summaries[i] is None})
        for one in _passes(engine, meant, summaries):
            found = summarised(one.problem, engine, one.summary)
            results |= {i: reductions[i].found(found, one.problem) for i in one.places}
        return tuple((results | own)[i] for i in range(len(reductions)))


def _meant(reduction: Reduction[Any], problem: Problem) -> Problem:
    """The problem whose weights a reduction reads."""
    found = reduction.of(problem)
    return found if found is problem or ours(reduction) else checked(found, f"{type(reduction).__name__}.of")


class _Pass:
    """One pass over the weights of a problem, for the reductions at these places."""

    def __init__(self, problem: Problem, summary: Summary, place: int, engine: Engine) -> None:
        self.problem, self.summary, self.places = problem, summary, [place]
        self.fused = engine.fuses(problem, summary)

    def takes(self, problem: Problem, summary: Summary, engine: Engine) -> Summary | None:
        """Both summaries as one; None where they do not go together."""
        mine = self.problem
        if (mine.sinks is None, mine.origin) != (problem.sinks is None, problem.origin):
            return None
        both = self.summary.with_also(summary)
        if both is None or engine.fuses(mine, summary) != self.fused:
            return None  # else a statistic without a fused pass would keep the others from theirs
        return both if engine.fuses(mine, both) == self.fused else None


def _passes(engine: Engine, problems: list[Problem], summaries: list[Summary | None]) -> list[_Pass]:
    passes: list[_Pass] = []
    for i, (meant, summary) in enumerate(zip(problems, summaries, strict=True)):
        if summary is None:
            continue
        for one in passes:
            both = one.takes(meant, summary, engine)
            if both is not None:
                one.summary = both
                one.problem = meant if one.problem.value is None else one.problem
                one.places.append(i)
                break
        else:
            passes.append(_Pass(meant, summary, i, engine))
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
