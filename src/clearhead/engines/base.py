"""The interface of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.torch_state.batched import Gradients, followed_back, views
from clearhead.engines.tiled import tiles
from clearhead.engines.tiled.backward import add_sent
from clearhead.engines.tiled.statistics import in_blocks
from clearhead.problem import regions
from clearhead.problem.guard import guard
from clearhead.problem.packing import Operands, in_dtypes, operands, with_operands
from clearhead.problem.partial import Partial, Rows, rows_of, sinks_gradient
from clearhead.problem.problem import Problem
from clearhead.problem.region import Region
from clearhead.problem.regions import cut
from clearhead.problem.summary import Found, Sent, Summary


class Cost(NamedTuple):
    """The cost of a forward pass."""

    pairs: int  # query–key pairs that are computed, out of B · H · Lq · Lk
    bytes: int  # about how much memory at once, beyond inputs and output


class Engine(ABC):
    """An engine computes a `Problem`, or says why it cannot.

    A subclass gives `name`, `objections`, `forward` and `cost`.

    >>> import torch, clearhead as ch
    >>> class Plain(ch.extend.Engine):
    ...     name = "plain"
    ...     def objections(self, problem):
    ...         return ["it has no mask"] if problem.visible is not None else []
    ...     def cost(self, problem):
    ...         return ch.extend.Cost(problem.query.shape[2] * problem.key.shape[2], 0)
    ...     def forward(self, problem, rows=False):
    ...         return ch.extend.Partial(torch.softmax(problem.query @ problem.key.mT / 2, -1) @ problem.value)
    >>> x = torch.eye(4)
    >>> torch.allclose(ch.attention(x, x, x, engine=Plain()), ch.attention(x, x, x))
    True
    """

    name: ClassVar[str]

    @abstractmethod
    def objections(self, problem: Problem) -> list[str]:
        """Why this engine can't take the problem; empty if it can."""

    def reservations(self, problem: Problem) -> list[str]:
        """Why this engine should not run by default, though it can. With any of these it runs only when asked for."""
        return []

    def notes(self, problem: Problem) -> list[str]:
        """Remarks for the caller about this problem on this engine: `Plan.notes`."""
        return []

    @abstractmethod
    def cost(self, problem: Problem) -> Cost:
        """The cost of the forward pass."""

    @abstractmethod
    def forward(self, problem: Problem, rows: bool = False) -> Partial:
        """The output; with `rows`, in float32 at least, and with the maximum and log_sum that `backward` reads.

        An engine without a `backward` may leave out maximum and log_sum.
        """

    def guarded(self, problem: Problem) -> Problem:
        """The problem as `backward` takes it: with finite operands, unless the engine keeps the others apart itself."""
        return guard(problem)

    def merge(self, problem: Problem, into: Partial) -> None:
        """Merge the result of a problem without sinks into that over other keys, `into`: see `Partial.add_`."""
        into.add_(self.forward(problem, rows=True))

    def add_gradients(self, problem: Problem, rows: Rows, grad: Tensor, sums: Operands) -> None:
        """Add the operands' gradients to these sums, in float32 at least; None: not wanted. See `backward`."""
        found = self.backward(problem, rows, grad, tuple(total is not None for total in sums))
        for total, part in zip(sums, found, strict=True):
            if total is not None and part is not None:
                total.add_(part)

    def backward(
        self, problem: Problem, rows: Rows, grad: Tensor | None, wanted: tuple[bool, ...], sent: Sent | None = None
    ) -> Operands:
        """The gradients of the operands, without the sinks, in float32 at least; None where not wanted.

        `grad` is the gradient of the output. `sent`, which statistics send back, is given only to an engine that
        `fuses` them. The problem is `guarded`.
        """
        raise NotImplementedError(f"{self.name} has no backward pass: it is transparent")

    def transparent(self, problem: Problem) -> bool:
        """Whether autograd is to follow the operations of `forward`; else `backward` gives the gradients."""
        return type(self).backward is Engine.backward

    def walk(self, problem: Problem) -> Iterator[Region]:
        """The regions for which an inspection computes scores, one after the other."""
        return regions.walk(problem, regions.LOOK)

    def scores(self, problem: Problem) -> Tensor:
        """The scores of a guarded problem, or of a part of one, with the bias, and −∞ where a pair is not allowed."""
        return tiles.scores(problem)

    def fuses(self, problem: Problem, summary: Summary) -> bool:
        """Whether `summarise` is a fused pass for it, whose gradients `backward` gives. Else autograd follows it."""
        return False

    def summarise(self, problem: Problem, summary: Summary) -> Found:
        """The statistics of the weights that `summary` names."""
        problem = guard(problem)
        return in_blocks(problem, list(self.walk(problem)), self.scores, summary)

    def contributions(
        self, problem: Problem, rows: Rows, grad: Tensor | None, sent: Sent | None, by_key: bool, positive: bool = False
    ) -> Tensor:
        """Weights times their gradients, w_ij Ṗ_ij, summed by query, (B, H, Lq), or `by_key`, (B, H, Lk).

        Ṗ_ij is Ȯ_i · V_j, for the `grad` of an output, plus the terms that statistics send back. `positive`: sum only
        the products above 0. The problem is guarded.
        """
        sizes, dtype = problem.sizes, accumulated(problem.query.dtype)
        shape = sizes.batch, sizes.heads, sizes.keys if by_key else sizes.queries
        found = rows.log_sum.new_zeros(shape, dtype=dtype)
        for region in self.walk(problem):
            at, part = region.sides[:3], cut(problem, region)
            weights = tiles.weights_in(self.scores(part), *(row[at] for row in rows[:2]))
            products = tiles.to_weights(None if grad is None else grad[at], part.value, weights)
            add_sent(products, sent or Sent(), region)
            products.mul_(weights).masked_fill_(weights == 0, 0.0)  # it would be 0 · ∞
            if positive:
                products.clamp_(min=0.0)
            if by_key:
                found[(*at[:2], region.keys)] += products.sum(2)
            else:
                found[at] += products.sum(-1)
        return found


def by_autograd(
    engine: Engine,
    problem: Problem,
    wanted: Sequence[bool],
    grad: Tensor,
    create_graph: bool,
    to_log_sum: Tensor | None = None,
) -> Gradients:
    """The gradients of the operands, by autograd, through an engine's own operations, which run once more.

    `grad` and `to_log_sum`: the gradients of output and log_sum.
    """
    rows = to_log_sum is not None
    grads = grad, to_log_sum
    return through_operations(lambda given: engine.forward(given, rows)[:3:2], problem, wanted, grads, create_graph)


def through_operations(
    compute: Callable[[Problem], Sequence[Any]],
    problem: Problem,
    wanted: Sequence[bool],
    grads: Sequence[Tensor | None],
    create_graph: bool,
) -> Gradients:
    """The gradients of the operands, by autograd, through the operations of `compute`, which run once more. `grads`:
    the gradients of its results; a result that depends on no operand that needs a gradient has no graph."""
    with torch.enable_grad():
        own = views(operands(problem))
        found = compute(with_operands(problem, own))
    given = ((f, g) for f, g in zip(found, grads, strict=True) if f is not None and g is not None)
    pairs = [(f, g.to(f.dtype)) for f, g in given if f.requires_grad]
    if not pairs:
        return (None,) * len(wanted)
    return followed_back([f for f, _ in pairs], [g for _, g in pairs], own, wanted, create_graph)


def usable_in_backward(engine: Engine, problem: Problem, plain: Engine) -> Engine:
    """Return the engine of a forward pass, or `plain` where it objects to the mode of the backward pass: a transform,
    forward mode or a trace that is active there follows PyTorch's operations, and no kernel."""
    return engine if problem.mode.eager or not engine.objections(problem) else plain


def gradients_of(
    engine: Engine,
    problem: Problem,
    kept: Partial,
    grad: Tensor,
    wanted: tuple[bool, ...],
    to_log_sum: Tensor | None = None,
) -> Gradients:
    """The gradients of the operands, each of its operand's dtype, by the engine's own backward pass. `kept`: the result
    of its forward pass. `grad` and `to_log_sum`: the gradients of output and log_sum."""
    delta = (grad * kept.output).sum(-1)
    rows = Rows(*rows_of(kept), delta if to_log_sum is None else delta - to_log_sum)
    found = engine.backward(problem if kept.finite else engine.guarded(problem), rows, grad, wanted)
    if problem.sinks is not None and wanted[-1]:
        found = found._replace(sinks=sinks_gradient(problem.sinks, rows))
    return in_dtypes(found, operands(problem))
