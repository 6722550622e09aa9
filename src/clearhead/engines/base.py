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
    """The cost of a forward pass.

    Attributes:
        pairs: The number of query–key pairs that the engine computes, of B · H · Lq · Lk.
        bytes: The approximate peak memory, in bytes, besides inputs and output.
    """

    pairs: int
    bytes: int


class Engine(ABC):
    """Base class of engines: an engine computes a `Problem`, or lists why it cannot.

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

    A subclass defines `name`, `objections`, `forward` and `cost`. Without `backward`, autograd differentiates the
    operations of `forward`.

    Attributes:
        name: The name of the engine, as in `engine=` and in a `Plan`.
    """

    name: ClassVar[str]

    @abstractmethod
    def objections(self, problem: Problem) -> list[str]:
        """Return why this engine cannot compute the problem.

        Args:
            problem: The problem.

        Returns:
            One sentence for each reason; empty if it can.
        """

    def reservations(self, problem: Problem) -> list[str]:
        """Return why this engine should not run by default, although it can.

        With a reservation the engine runs only if `engine=` names it.

        Args:
            problem: The problem.

        Returns:
            One sentence for each reason; empty by default.
        """
        return []

    def notes(self, problem: Problem) -> list[str]:
        """Return remarks for the caller about this problem on this engine, for `Plan.notes`.

        Args:
            problem: The problem.

        Returns:
            The remarks; empty by default.
        """
        return []

    @abstractmethod
    def cost(self, problem: Problem) -> Cost:
        """Estimate the cost of the forward pass.

        Args:
            problem: The problem.

        Returns:
            The number of pairs and the memory.
        """

    @abstractmethod
    def forward(self, problem: Problem, rows: bool = False) -> Partial:
        """Compute the output.

        Args:
            problem: The problem.
            rows: Whether to return the maximum and the log_sum that `backward` reads too, and all results in float32 or
                float64. An engine without a `backward` may leave out maximum and log_sum.

        Returns:
            The output, (B, H, Lq, Ev), with maximum and log_sum, (B, H, Lq).
        """

    def guarded(self, problem: Problem) -> Problem:
        """Return the problem in the form that `backward` takes: its operands are finite.

        An engine that handles non-finite operands itself may return the problem as it is.

        Args:
            problem: The problem of the forward pass.

        Returns:
            The problem with finite operands and a poison: see `guard`.
        """
        return guard(problem)

    def merge(self, problem: Problem, into: Partial) -> None:
        """Merge the result of a problem without sinks into a result over other keys: see `Partial.add_`.

        Args:
            problem: The problem to compute.
            into: The result over the other keys, which is changed in place.
        """
        into.add_(self.forward(problem, rows=True))

    def add_gradients(self, problem: Problem, rows: Rows, grad: Tensor, sums: Operands) -> None:
        """Add the gradients of the operands to sums: see `backward`.

        Args:
            problem: The problem, as `guarded` returns it.
            rows: The numbers of each query's softmax, (B, H, Lq).
            grad: The gradient of the output, (B, H, Lq, Ev).
            sums: The sums, in float32 or float64, which are changed in place; None for a gradient that is not wanted.
        """
        found = self.backward(problem, rows, grad, tuple(total is not None for total in sums))
        for total, part in zip(sums, found, strict=True):
            if total is not None and part is not None:
                total.add_(part)

    def backward(
        self, problem: Problem, rows: Rows, grad: Tensor | None, wanted: tuple[bool, ...], sent: Sent | None = None
    ) -> Operands:
        """Compute the gradients of the operands, without the sinks.

        Args:
            problem: The problem, as `guarded` returns it.
            rows: The numbers of each query's softmax, (B, H, Lq).
            grad: The gradient of the output, (B, H, Lq, Ev); None if only statistics have gradients.
            wanted: For each operand, whether to compute its gradient.
            sent: The gradients that statistics send back; only for an engine that `fuses` them.

        Returns:
            The gradients, in float32 or float64; None where not wanted.

        Raises:
            NotImplementedError: If the engine is `transparent`.
        """
        raise NotImplementedError(f"{self.name} has no backward pass: it is transparent")

    def transparent(self, problem: Problem) -> bool:
        """Whether autograd differentiates the operations of `forward`; otherwise `backward` computes the gradients.

        Args:
            problem: The problem.

        Returns:
            By default, whether the class has no `backward` of its own.
        """
        return type(self).backward is Engine.backward

    def walk(self, problem: Problem) -> Iterator[Region]:
        """Iterate over the regions for which an inspection computes scores, one after the other.

        Args:
            problem: The problem.

        Returns:
            An iterator of regions that cover the matrix.
        """
        return regions.walk(problem, regions.LOOK)

    def scores(self, problem: Problem) -> Tensor:
        """Compute the scores of a problem with the bias, and −∞ at masked pairs.

        Args:
            problem: A problem with finite operands, or a part of one.

        Returns:
            The scores, (B, H, Lq, Lk).
        """
        return tiles.scores(problem)

    def fuses(self, problem: Problem, summary: Summary) -> bool:
        """Whether `summarise` computes these statistics in a fused pass, and `backward` computes their gradients.

        Args:
            problem: The problem.
            summary: The statistics.

        Returns:
            False by default: autograd then differentiates `summarise`.
        """
        return False

    def summarise(self, problem: Problem, summary: Summary) -> Found:
        """Compute statistics of the weights.

        Args:
            problem: The problem.
            summary: The statistics to compute.

        Returns:
            The statistics; None for each one that `summary` does not request.
        """
        problem = guard(problem)
        return in_blocks(problem, list(self.walk(problem)), self.scores, summary)

    def contributions(
        self, problem: Problem, rows: Rows, grad: Tensor | None, sent: Sent | None, by_key: bool, positive: bool = False
    ) -> Tensor:
        """Compute the weights times their gradients, summed by query or by key.

        Args:
            problem: The problem, as `guarded` returns it.
            rows: The numbers of each query's softmax, (B, H, Lq).
            grad: The gradient of the output, (B, H, Lq, Ev); None if only statistics have gradients.
            sent: The gradients that statistics send back.
            by_key: Whether to sum over the queries of each key, and not over the keys of each query.
            positive: Whether to sum only the products above 0; False by default.

        Returns:
            The sums, (B, H, Lq), or (B, H, Lk) with `by_key`.

        Formula:
            Σ w_ij Ṗ_ij, where Ṗ_ij is Ȯ_i · V_j for the `grad` of the output, plus the terms of the statistics.
        """
        sizes, dtype = problem.sizes, accumulated(problem.query.dtype)
        shape = sizes.batch, sizes.heads, sizes.keys if by_key else sizes.queries
        found = rows.log_sum.new_zeros(shape, dtype=dtype)
        for region in self.walk(problem):
            at, part = region.sides[:3], cut(problem, region)
            weights = tiles.weights_in(self.scores(part), *(row[at] for row in rows[:2]))
            products = tiles.to_weights(None if grad is None else grad[at], part.value, weights)
            add_sent(products, sent or Sent(), region)
            products.mul_(weights).masked_fill_(weights == 0, 0.0)  # 0 · ∞ would be NaN
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
    """Compute the gradients of the operands by autograd through the engine's own operations, which run once more.

    Args:
        engine: The engine of the forward pass.
        problem: Its problem.
        wanted: For each operand, whether to compute its gradient.
        grad: The gradient of the output.
        create_graph: Whether the gradients are differentiable themselves.
        to_log_sum: The gradient of log_sum.
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
    """Compute the gradients of the operands by autograd through the operations of `compute`, which run once more.

    `grads` are the gradients of its results. A result that depends on no operand that requires grad has no graph.
    """
    with torch.enable_grad():
        own = views(operands(problem))
        found = compute(with_operands(problem, own))
    given = ((f, g) for f, g in zip(found, grads, strict=True) if f is not None and g is not None)
    pairs = [(f, g.to(f.dtype)) for f, g in given if f.requires_grad]
    if not pairs:
        return (None,) * len(wanted)
    return followed_back([f for f, _ in pairs], [g for _, g in pairs], own, wanted, create_graph)


def usable_in_backward(engine: Engine, problem: Problem, plain: Engine) -> Engine:
    """Return the engine of a forward pass, or `plain` if the engine objects to the mode of the backward pass.

    A transform, forward mode or a trace that is active in the backward pass follows PyTorch's operations, and no
    kernel.
    """
    return engine if problem.mode.eager or not engine.objections(problem) else plain


def gradients_of(
    engine: Engine,
    problem: Problem,
    kept: Partial,
    grad: Tensor,
    wanted: tuple[bool, ...],
    to_log_sum: Tensor | None = None,
) -> Gradients:
    """Compute the gradients of the operands by the engine's own backward pass, each in the dtype of its operand.

    Args:
        engine: The engine of the forward pass.
        problem: Its problem.
        kept: Its result.
        grad: The gradient of the output.
        wanted: For each operand, whether to compute its gradient.
        to_log_sum: The gradient of log_sum.
    """
    delta = (grad * kept.output).sum(-1)
    rows = Rows(*rows_of(kept), delta if to_log_sum is None else delta - to_log_sum)
    found = engine.backward(problem if kept.finite else engine.guarded(problem), rows, grad, wanted)
    if problem.sinks is not None and wanted[-1]:
        found = found._replace(sinks=sinks_gradient(problem.sinks, rows))
    return in_dtypes(found, operands(problem))
