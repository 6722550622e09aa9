"""Which engine runs."""

from __future__ import annotations

import math

from clearhead._errors import UnsupportedError
from clearhead._problem import Problem
from clearhead.engines.base import Engine
from clearhead.engines.reference import Reference
from clearhead.engines.sdpa import Sdpa
from clearhead.engines.tiled import Tiled

# In order of preference: the first without objections runs.
ENGINES: tuple[Engine, ...] = (Sdpa(), Tiled(), Reference())

# The reference engine makes every matrix in full: above this many pairs it runs only when asked for by name.
REFERENCE_PAIRS = 2**22


def choose(problem: Problem, engine: str | Engine | None) -> Engine:
    """The engine asked for, by name or itself, which runs or raises with its objections; None: the first that can."""
    if engine is None:
        for candidate in ENGINES:
            if not candidate.objections(problem):
                return candidate
    if isinstance(engine, Engine):
        return _willing(engine, problem)
    named = {candidate.name: candidate for candidate in ENGINES}
    if not isinstance(engine, str) or engine not in named:
        raise UnsupportedError(f"engine is {engine!r}; the engines are {', '.join(map(repr, named))}.")
    return _willing(named[engine], problem)


def _willing(engine: Engine, problem: Problem) -> Engine:
    objections = engine.objections(problem)
    if objections:
        listed = "\n".join(f"  - {o}" for o in objections)
        raise UnsupportedError(f"the engine {engine.name!r} can't run this:\n{listed}")
    return engine


def reasons(problem: Problem, chosen: Engine, asked: bool) -> dict[str, list[str]]:
    """Why each other engine was not chosen, in words."""
    return {other.name: _declined(problem, other, chosen, asked) for other in ENGINES if other is not chosen}


def _declined(problem: Problem, other: Engine, chosen: Engine, asked: bool) -> list[str]:
    objections = other.objections(problem)
    if other.name == "reference" and math.prod(problem.sizes.shape) > REFERENCE_PAIRS:
        objections = [*objections, f"makes every pair at once, more than {REFERENCE_PAIRS:,}: only when asked for"]
    return objections or [f"could run it; {chosen.name} {'was asked for' if asked else 'comes first'}"]
