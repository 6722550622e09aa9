"""What an engine is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from clearhead.engines.tiled import tiles
from clearhead.problem import regions
from clearhead.problem.packing import Operands, operands, with_operands
from clearhead.problem.partial import Partial, Rows
from clearhead.problem.problem import Problem
from clearhead.problem.regions import Region
from clearhead.problem.summary import Found, Summary


class Cost(NamedTuple):
    """What a forward pass takes."""

    pairs: int  # query–key pairs that are computed, out of B · H · Lq · Lk
    bytes: int  # about how much memory at once, beyond inputs and output


class Engine(ABC):
    """Computes a `Problem`, or says in words why it can't. One of your own gives `objections`, `forward` and `cost`."""

    name: ClassVar[str]

    @abstractmethod
    def objections(self, problem: Problem) -> list[str]:
        """Why this engine can't take the problem; empty if it can."""

    def reservations(self, problem: Problem) -> list[str]:
        """Why it would rather not, though it can: then it runs only when asked for by name."""
        return []

    def notes(self, problem: Problem) -> list[str]:
        """What a person should know before running this problem on this engine."""
        return []

    @abstractmethod
    def cost(self, problem: Problem) -> Cost:
        """What the forward pass takes."""

    @abstractmethod
    def forward(self, problem: Problem, rows: bool = False) -> Partial:
        """The output; with `rows`, in float32 at least, and with the maximum and log_sum that `backward` begins with.

        An engine without a `backward` may leave those out.
        """

    def backward(self, problem: Problem, rows: Rows, grad: Tensor, wanted: tuple[bool, ...]) -> Operands:
        """The gradients to the operands, but for the sinks, of float32 at least; None where not wanted.

        `grad` is the output's. The problem is guarded (`problem.guard`).
        """
        raise NotImplementedError(f"{self.name} has no backward pass: it is transparent")

    def transparent(self, problem: Problem) -> bool:
        """Whether autograd is to follow the operations of `forward`; else `backward` gives the gradients."""
        return type(self).backward is Engine.backward

    def walk(self, problem: Problem) -> Iterator[Region]:
        """The regions that an inspection asks the scores of, one after the other."""
        return regions.walk(problem, regions.LOOK)

    def scores(self, problem: Problem) -> Tensor:
        """The scores of a guarded problem, or of a part of one, with bias, −∞ where a pair is not allowed."""
        return tiles.scores(problem)

    def summarise(self, problem: Problem, summary: Summary) -> Found | None:
        """What is looked for in the weights, found in one fused pass; None where the engine has none for it."""
        return None


def by_autograd(
    engine: Engine, problem: Problem, wanted: Sequence[bool], grad: Tensor, create_graph: bool
) -> tuple[Tensor | None, ...]:
    """The gradients to the operands, by autograd, through an engine's own operations, which run once more."""
    with torch.enable_grad():
        # views: one tensor in two places, or one operand made of another, have gradients of their own here
        own = [None if t is None else t.view_as(t) for t in operands(problem)]
        output = engine.forward(with_operands(problem, own)).output
    some = [t for t, want in zip(own, wanted, strict=True) if want and t is not None]
    found = iter(torch.autograd.grad(output.to(grad.dtype), some, grad, create_graph=create_graph))
    return tuple(next(found) if want else None for want in wanted)
