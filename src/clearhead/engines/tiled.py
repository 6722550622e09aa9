"""Any score, any mask, any device, in memory that grows with the length and not with its square."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from clearhead import _tiles
from clearhead._backward import Operands, gradients, operands
from clearhead._differentiable import block_output, checkpointed, differentiated_again
from clearhead._problem import Problem, guard
from clearhead._tiles import Block
from clearhead._values import compiling, transformed
from clearhead.engines.base import Engine
from clearhead.scores.base import accumulated


class Tiled(Engine):
    """PyTorch operations over blocks of queries, keys sliced to the block's spans; the backward computes blocks again.

    One block's scores exist at a time, forward and backward. Second derivatives are autograd's own, through
    checkpoints of the blocks.
    """

    name = "tiled"

    def objections(self, problem: Problem) -> list[str]:
        return []

    def run(self, problem: Problem) -> Tensor:
        problem = guard(problem)
        every = list(_tiles.blocks(problem, _tiles.BUDGET))
        if not every or not problem.sizes.keys:
            return _tiles.no_keys(problem, problem.query)
        if len(every) == 1 or not problem.needs_grad or transformed():  # transforms take no checkpoints
            return _tiles.assemble([block_output(problem, block) for block in every], every)
        if problem.lowered is None or compiling():  # what the score closes over is unknown: autograd finds it
            return checkpointed(problem, every)
        out: Tensor = _Recomputed.apply(problem, every, *operands(problem))  # type: ignore[no-untyped-call]
        return out

    def tiles(self, problem: Problem) -> Iterator[tuple[Block, Tensor]]:
        return _tiles.stream(guard(problem))

    def pairs(self, problem: Problem) -> int:
        return sum(block.area for block in _tiles.blocks(problem, _tiles.BUDGET))

    def extra_bytes(self, problem: Problem) -> int:
        width = _tiles.width(problem)
        largest = max((block.area * width for block in _tiles.blocks(problem, _tiles.BUDGET)), default=0)
        return 3 * accumulated(problem.query.dtype).itemsize * largest


def gradients_of(problem: Problem, wanted: tuple[bool, ...], grad: Tensor) -> Operands:
    """The gradients to the operands of a lowered problem, from that of its output."""
    problem = guard(problem)
    return gradients(problem, list(_tiles.blocks(problem, _tiles.BUDGET)), wanted, grad)


class _Recomputed(torch.autograd.Function):
    """All blocks as one step for autograd, which leaves nothing behind but the output.

    With a checkpoint a block, each block leaves its output and its graph between two blocks' scores, and the memory
    between them is split up and lost to the next: measured, 1.1 GiB at 16,384 queries where 0.1 is in use.
    """

    @staticmethod
    def forward(ctx: Any, problem: Problem, every: list[Block], *tensors: Tensor | None) -> Tensor:
        assert problem.value is not None
        ctx.save_for_backward(*tensors)
        ctx.problem, ctx.every, ctx.stamp = problem, every, problem.stamp()
        out = problem.query.new_empty(*problem.query.shape[:3], problem.value.shape[-1])
        for block in every:
            out[block.batch, block.heads, block.queries] = block_output(problem, block)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        problem: Problem = ctx.problem
        problem.check_stamp(ctx.stamp)
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # the gradient is to be differentiated
            return (None, None, *differentiated_again(problem, ctx.every, tensors, needed, grads[0]))
        return (None, None, *gradients(problem, ctx.every, needed, grads[0]))
