"""The choice of the engine that runs."""

from __future__ import annotations

from clearhead.base.errors import UnsupportedError
from clearhead.base.output.text import brief
from clearhead.engines.base import Engine
from clearhead.engines.flex.engine import Flex
from clearhead.engines.native.engine import Native
from clearhead.engines.own import Own
from clearhead.engines.reference import Reference
from clearhead.engines.sdpa.engine import Sdpa
from clearhead.engines.tiled.engine import Tiled
from clearhead.engines.triton.engine import Triton
from clearhead.problem.checked import ours
from clearhead.problem.problem import Problem

# In order of preference: the first without objections or reservations runs. Tiled never has any.
FLEX = Flex()
ENGINES: tuple[Engine, ...] = (Native(), FLEX, Sdpa(), Triton(), Tiled(), Reference())
ON_THE_HOST = tuple(engine for engine in ENGINES if engine is not FLEX)  # which has a reservation there in every case


def choose(problem: Problem, engine: str | Engine | None, rows: bool = False) -> Engine:
    """The engine asked for, by name or as an object, or an error with its objections; for None, the first that can.

    `rows`: for the output and the log-sum-exp, and the gradients of both. An engine gives them as it gives statistics;
    FlexAttention, which has no statistics, gives these two.
    """
    if rows and isinstance(engine, str | None):
        able = engine is None and not (FLEX.costs(problem) or FLEX.objections(problem))
        if able or engine == Flex.name:
            return _willing(FLEX, problem)
    problem = problem._replace(value=None) if rows else problem
    if engine is None:
        for candidate in ON_THE_HOST if problem.scores.query.is_cpu else ENGINES:
            if not candidate.reservations(problem) and not candidate.objections(problem):
                return candidate
    if isinstance(engine, Engine):
        found = _willing(engine, problem)
        return found if ours(found) else Own(found)
    named = {candidate.name: candidate for candidate in ENGINES}
    if not isinstance(engine, str) or engine not in named:
        raise UnsupportedError(f"engine is {brief(engine)}; the engines are {', '.join(map(repr, named))}.")
    return _willing(named[engine], problem)


def as_written(engine: str | Engine | None) -> bool:
    """Whether an engine takes a problem whose score and mask are not lowered."""
    return engine == Reference.name if isinstance(engine, str) else isinstance(engine, Reference)


def _willing(engine: Engine, problem: Problem) -> Engine:
    objections = engine.objections(problem)
    if objections:
        listed = "\n".join(f"  - {o}" for o in objections)
        raise UnsupportedError(f"the engine {engine.name!r} can't run this:\n{listed}")
    return engine


def reasons(problem: Problem, chosen: Engine, asked: bool) -> dict[str, list[str]]:
    """Why each other engine was not chosen."""
    able = [f"could run it; {chosen.name} {'was asked for' if asked else 'comes first'}"]
    others = (engine for engine in ENGINES if engine.name != chosen.name)
    return {other.name: [*other.objections(problem), *other.reservations(problem)] or able for other in others}
