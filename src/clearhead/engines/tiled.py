"""Any score, any mask, any device, in memory that grows with the length and not with its square."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clearhead import _tiles
from clearhead._backward import Operands, gradients, operands, with_operands
from clearhead._problem import Problem, guard
from clearhead._tiles import Block
from clearhead._values import compiling, transformed
from clearhead.engines.base import Engine
from clearhead.scores.base import accumulated

BUDGET = 2**21  # elements of a block's scores, or of what is made on the way to them
LOOK = 2**20  # the same for an inspection, which makes a few passes over each block: it should stay in the cache


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
        every = list(_tiles.blocks(problem, BUDGET))
        if not every or not problem.sizes.keys:
            return _tiles.no_keys(problem, problem.query)
        if len(every) == 1 or not problem.needs_grad or transformed():  # transforms take no checkpoints
            return _tiles.assemble([_block(problem, block) for block in every], every)
        if problem.lowered is None or compiling():  # what the score closes over is unknown: autograd finds it
            return _checkpointed(problem, every)
        out: Tensor = _Recomputed.apply(problem, every, *operands(problem))  # type: ignore[no-untyped-call]
        return out

    def tiles(self, problem: Problem) -> Iterator[tuple[Block, Tensor]]:
        problem = guard(problem)
        for block in _tiles.blocks(problem, LOOK):
            yield block, _tiles.scores(problem, block)

    def pairs(self, problem: Problem) -> int:
        return sum(block.area for block in _tiles.blocks(problem, BUDGET))

    def extra_bytes(self, problem: Problem) -> int:
        width = _tiles.width(problem)
        largest = max((block.area * width for block in _tiles.blocks(problem, BUDGET)), default=0)
        return 3 * accumulated(problem.query.dtype).itemsize * largest


def gradients_of(problem: Problem, wanted: tuple[bool, ...], grad: Tensor) -> Operands:
    """The gradients to the operands of a lowered problem, from that of its output."""
    problem = guard(problem)
    return gradients(problem, list(_tiles.blocks(problem, BUDGET)), wanted, grad)


def _block(problem: Problem, block: Block) -> Tensor:
    """The output of one block's rows: all the keys they may see are in it."""
    assert problem.value is not None
    if block.keys.stop <= block.keys.start:
        return _tiles.no_keys(problem, problem.query[block.batch, block.heads, block.queries])
    weights = _tiles.weights(problem, block, _tiles.scores(problem, block))
    value = _tiles.head_part(problem.value, problem.groups, block)[:, :, block.keys]
    weights = _tiles.dropped(problem, block, weights)
    return _tiles.grouped_product(weights, value.to(weights.dtype)).to(value.dtype)


def _checkpointed(problem: Problem, every: list[Block]) -> Tensor:
    """Each block under a checkpoint: autograd computes it again, and may differentiate that in turn."""
    stamp = problem.stamp()

    def again(block: Block) -> Tensor:
        problem.check_stamp(stamp)
        return _block(problem, block)

    parts = [checkpoint(again, block, use_reentrant=False, preserve_rng_state=False) for block in every]
    return _tiles.assemble(parts, every)


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
            out[block.batch, block.heads, block.queries] = _block(problem, block)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        problem: Problem = ctx.problem
        problem.check_stamp(ctx.stamp)
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # the gradient is to be differentiated
            wanted = [t for t, need in zip(tensors, needed, strict=True) if need]
            out = _checkpointed(with_operands(problem, tensors), ctx.every)
            found = iter(torch.autograd.grad(out, wanted, grads[0], create_graph=True))
            return (None, None, *(next(found) if need else None for need in needed))
        return (None, None, *gradients(problem, ctx.every, needed, grads[0]))
