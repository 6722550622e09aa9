"""What an engine is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from clearhead.engines.tiled import tiles
from clearhead.problem import regions
from clearhead.problem.problem import Problem
from clearhead.problem.regions import Region
from clearhead.problem.summary import Found, Summary


class Engine(ABC):
    """Computes a `Problem`, or says in words why it can't."""

    name: ClassVar[str]

    @abstractmethod
    def objections(self, problem: Problem) -> list[str]:
        """Why this engine can't take the problem; empty if it can."""

    @abstractmethod
    def run(self, problem: Problem) -> Tensor:
        """The output, (B, H, Lq, Ev), of the value's dtype."""

    @abstractmethod
    def pairs(self, problem: Problem) -> int:
        """How many query–key pairs it computes, out of B · H · Lq · Lk."""

    @abstractmethod
    def extra_bytes(self, problem: Problem) -> int:
        """About how much memory it needs at once beyond inputs and output, forward."""

    def reservations(self, problem: Problem) -> list[str]:
        """Why it would rather not, though it can: then it runs only when asked for by name."""
        return []

    def walk(self, problem: Problem) -> Iterator[Region]:
        """The regions that an inspection asks the scores of, one after the other."""
        return regions.walk(problem, regions.LOOK)

    def scores(self, problem: Problem) -> Tensor:
        """The scores of a guarded problem, or of a part of one, with bias, −∞ where a pair is not allowed."""
        return tiles.scores(problem)

    def summarise(self, problem: Problem, summary: Summary) -> Found | None:
        """What is looked for in the weights, found in one fused pass; None where the engine has none for it."""
        return None

    def notes(self, problem: Problem) -> list[str]:
        """What a person should know before running this problem on this engine."""
        return []
