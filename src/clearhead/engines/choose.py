"""The choice of the engine that runs a call."""

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

# In order of preference: the first engine without objections or reservations runs. Tiled never has any.
FLEX = Flex()
ENGINES: tuple[Engine, ...] = (Native(), FLEX, Sdpa(), Triton(), Tiled(), Reference())
ON_THE_HOST = tuple(engine for engine in ENGINES if engine is not FLEX)  # on a CPU FLEX always has a reservation


def choose(problem: Problem, engine: str | Engine | None, rows: bool = False) -> Engine:
    """Return the engine that runs a problem; raise an error with its objections if it cannot.

    Args:
        problem: The problem.
        engine: The engine by name or as an object; None: the first one without objections and reservations.
        rows: Whether the call returns the output and the log-sum-exp, with the gradients of both. Engines compute the
            two as statistics; FlexAttention has no other statistics than these.
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
        raise UnsupportedError(f"engine is {brief(engine)}; expected one of {', '.join(map(repr, named))}.")
    return _willing(named[engine], problem)


def as_written(engine: str | Engine | None) -> bool:
    """Return whether an engine takes a problem whose score and mask are not lowered."""
    return engine == Reference.name if isinstance(engine, str) else isinstance(engine, Reference)


def _willing(engine: Engine, problem: Problem) -> Engine:
    """Return the engine, or raise an error with its objections."""
    objections = engine.objections(problem)
    if objections:
        listed = "\n".join(f"  - {o}" for o in objections)
        raise UnsupportedError(f"the engine {engine.name!r} can't run this:\n{listed}")
    return engine


def reasons(problem: Problem, chosen: Engine, asked: bool) -> dict[str, list[str]]:
    """Return why each engine other than the chosen one does not run."""
    able = [f"eligible; {'the call names' if asked else 'lower priority than'} {chosen.name}"]
    others = (engine for engine in ENGINES if engine.name != chosen.name)
    return {other.name: [*other.objections(problem), *other.reservations(problem)] or able for other in others}
