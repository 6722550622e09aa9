"""The output as a step of autograd's.

What is kept for the backward pass is what autograd saves: so it can be freed by a checkpoint, moved by hooks, and is
checked for writes. Where a gradient is itself differentiated, or is not plain numbers, the blocks are computed in
operations of PyTorch's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clearhead.base.batched import unbatched
from clearhead.base.tracing import compiling, dispatches, with_memory
from clearhead.engines.tiled import tiles
from clearhead.engines.tiled.backward import Operands, operands, with_operands, without_operands
from clearhead.problem import regions
from clearhead.problem.problem import Problem, guard
from clearhead.problem.regions import Region, cut

Kept = tuple[Tensor, ...]


class Step(ABC):
    """How an engine computes one output, and later its gradients; see `run`."""

    @abstractmethod
    def forward(self, problem: Problem) -> tuple[Tensor, Kept]:
        """The output, of the value's dtype, and tensors that the gradients need besides the operands."""

    @abstractmethod
    def backward(self, problem: Problem, wanted: tuple[bool, ...], grad: Tensor, kept: Kept) -> Operands:
        """The gradients to the operands (see tiled/backward.py), each of its operand's dtype; None where not wanted."""


def run(problem: Problem, step: Step) -> Tensor:
    """The output of a lowered problem, differentiable in its operands."""
    out: Tensor = _Run.apply(step, problem, *operands(problem))  # type: ignore[no-untyped-call]
    return out


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Step, problem: Problem, *tensors: Tensor | None) -> Tensor:
        output, kept = step.forward(problem)
        ctx.save_for_backward(*tensors, *kept)
        ctx.step, ctx.problem, ctx.reads = step, without_operands(problem), problem.reads()
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.reads.check()
        saved, needed, grad = ctx.saved_tensors, ctx.needs_input_grad[2:], grads[0]
        tensors, kept = saved[: len(needed)], saved[len(needed) :]
        problem = with_operands(ctx.problem, tensors)
        if torch.is_grad_enabled():  # the gradient is to be differentiated
            return (None, None, *_by_autograd(problem, tensors, needed, grad, create_graph=True))
        if dispatches(grad):
            return (None, None, *_by_autograd(problem, tensors, needed, grad, create_graph=False))

        def compute(grad: Tensor) -> Operands:
            return ctx.step.backward(problem, needed, with_memory(grad), kept)  # type: ignore[no-any-return]

        return (None, None, *unbatched(compute, grad))


def output_of(problem: Problem) -> Tensor:
    """The output of a part that has all the keys that its queries may see."""
    assert problem.value is not None
    if not compiling() and not problem.sizes.keys:
        return tiles.no_keys(problem, problem.query)
    weights = tiles.dropped(problem, tiles.weights(problem, tiles.scores(problem)))
    return tiles.grouped_product(weights, problem.value.to(weights.dtype)).to(problem.value.dtype)


def checkpointed(problem: Problem) -> Tensor:
    """Each block under a checkpoint: autograd computes it again, and may differentiate that in turn."""
    rest, reads = without_operands(problem), problem.reads()

    def again(region: Region, *tensors: Tensor | None) -> Tensor:
        nonlocal reads
        reads.check()
        try:  # a checkpoint stops what is computed again where it has all that it needs
            return output_of(cut(with_operands(rest, tensors), region))
        finally:
            reads = rest.reads()  # a score's own writes, to a counter or running statistics, are no one else's

    every = list(regions.walk(problem, regions.BUDGET))
    tensors = operands(problem)
    draws = problem.lowered is None  # its tile() may draw random numbers
    parts = [checkpoint(again, region, *tensors, use_reentrant=False, preserve_rng_state=draws) for region in every]
    return regions.assemble(parts, every)


def in_plain_operations(problem: Problem) -> Tensor:
    """Each block as it is, for whatever follows PyTorch's operations one by one: transforms, forward mode."""
    every = list(regions.walk(problem, regions.BUDGET))
    return regions.assemble([output_of(cut(problem, region)) for region in every], every)


def _by_autograd(
    problem: Problem, tensors: Operands, needed: tuple[bool, ...], grad: Tensor, create_graph: bool
) -> Operands:
    """The gradients to the operands from plain operations; joined to them and to `grad`, if they are to be a graph."""
    wanted = [t for t, need in zip(tensors, needed, strict=True) if need and t is not None]
    with torch.enable_grad():
        out = checkpointed(guard(problem))
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=create_graph))
    return tuple(next(found) if need else None for need in needed)
