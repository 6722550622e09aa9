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


def choose(problem: Problem, engine: str | None) -> Engine:
    """The engine named, or the first that can; an engine named either runs or raises with its objections."""
    if engine is None:
        for candidate in ENGINES:
            if not candidate.objections(problem):
                return candidate
    named = {candidate.name: candidate for candidate in ENGINES}
    if not isinstance(engine, str) or engine not in named:
        raise UnsupportedError(f"engine is {engine!r}; the engines are {', '.join(map(repr, named))}.")
    objections = named[engine].objections(problem)
    if objections:
        raise UnsupportedError(f"the engine {engine!r} can't run this:\n" + "\n".join(f"  - {o}" for o in objections))
    return named[engine]


def reasons(problem: Problem, chosen: Engine, asked: bool) -> dict[str, list[str]]:
    """Why each other engine was not chosen, in words."""
    return {other.name: _declined(problem, other, chosen, asked) for other in ENGINES if other is not chosen}


def _declined(problem: Problem, other: Engine, chosen: Engine, asked: bool) -> list[str]:
    objections = other.objections(problem)
    if other.name == "reference" and math.prod(problem.sizes.shape) > REFERENCE_PAIRS:
        objections = [*objections, f"makes every pair at once, more than {REFERENCE_PAIRS:,}: only when asked for"]
    return objections or [f"could run it; {chosen.name} {'was asked for' if asked else 'comes first'}"]
