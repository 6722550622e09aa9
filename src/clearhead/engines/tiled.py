"""Any score, any mask, any device, in memory that grows with the length and not with its square."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clearhead import _tiles
from clearhead._problem import Problem, guard
from clearhead._tiles import Block
from clearhead.engines.base import Engine
from clearhead.masks.base import part
from clearhead.scores.base import accumulated

BUDGET = 2**21  # elements of a block's scores, or of what is made on the way to them
LOOK = 2**20  # the same for an inspection, which makes a few passes over each block: it should stay in the cache

Operands = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]  # query, key, the score's weight, value, bias


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
        if len(every) == 1 or not problem.needs_grad:
            return _tiles.assemble([_block(problem, block) for block in every], every)
        if problem.lowered is None:  # what the score closes over is unknown: autograd finds it
            return _checkpointed(problem, every)
        lowered = problem.lowered
        out: Tensor = _Recomputed.apply(  # type: ignore[no-untyped-call]
            problem, every, lowered.query, lowered.key, lowered.weight, problem.value, problem.bias
        )
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


def _block(problem: Problem, block: Block) -> Tensor:
    """The output of one block's rows: all the keys they may see are in it."""
    if problem.lowered is not None:
        return _attend(problem, block, *_operands(problem, block))
    return _weigh(problem, block, _tiles.scores(problem, block), _operand_value(problem, block))


def _operand_value(problem: Problem, block: Block) -> Tensor:
    assert problem.value is not None
    return _tiles.head_part(problem.value, problem.groups, block)[:, :, block.keys]


def _operands(problem: Problem, block: Block) -> Operands:
    """What a block is computed from, views of the problem's tensors."""
    lowered, bias = problem.lowered, problem.bias
    assert lowered is not None
    return (
        lowered.query[block.batch, block.heads, block.queries],
        _tiles.head_part(lowered.key, problem.groups, block)[:, :, block.keys],
        lowered.weight,
        _operand_value(problem, block),
        None if bias is None else part(bias, block.batch, block.heads, block.queries, block.keys),
    )


def _attend(
    problem: Problem,
    block: Block,
    query: Tensor,
    key: Tensor,
    weight: Tensor | None,
    value: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """A block's output from its operands."""
    assert problem.lowered is not None
    tile = _tiles.pairwise(problem.lowered._replace(weight=weight), query, key)
    return _weigh(problem, block, _tiles.finish(problem, block, tile, bias), value)


def _weigh(problem: Problem, block: Block, scores: Tensor, value: Tensor) -> Tensor:
    if not scores.shape[-1]:
        return _tiles.no_keys(problem, problem.query[block.batch, block.heads, block.queries])
    weights = _tiles.softmax(scores, _tiles.may_be_empty(problem, block))
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
            out = _checkpointed(_with(problem, tensors), ctx.every)
            found = iter(torch.autograd.grad(out, wanted, grads[0], create_graph=True))
            return (None, None, *(next(found) if need else None for need in needed))
        sums = [None if t is None else torch.zeros_like(t, dtype=accumulated(t.dtype)) for t in tensors]
        total = _with(problem, sums)
        for block in ctx.every:
            _add_gradients(problem, total, block, needed, grads[0][block.batch, block.heads, block.queries])
        return (
            None,
            None,
            *(
                s.to(t.dtype) if need and s is not None else None
                for s, t, need in zip(sums, tensors, needed, strict=True)
            ),
        )


def _with(problem: Problem, tensors: Any) -> Problem:
    """The problem over other tensors: query, key, the score's weight, value, bias."""
    assert problem.lowered is not None
    query, key, weight, value, bias = tensors
    lowered = problem.lowered._replace(query=query, key=key, weight=weight)
    return problem._replace(lowered=lowered, value=value, bias=bias)


def _add_gradients(problem: Problem, total: Problem, block: Block, needed: tuple[bool, ...], grad: Tensor) -> None:
    """Add a block's part of each gradient to the sums in `total`, which are shaped as the problem's tensors."""
    if block.keys.stop <= block.keys.start:
        return
    leaves = [
        t if t is None else t.detach().requires_grad_(need)
        for t, need in zip(_operands(problem, block), needed, strict=True)
    ]
    with torch.enable_grad():
        out = _attend(problem, block, *leaves)  # type: ignore[arg-type]
    found = iter(
        torch.autograd.grad(out, [t for t, need in zip(leaves, needed, strict=True) if need and t is not None], grad)
    )
    for sums, need in zip(_operands(total, block), needed, strict=True):
        if need and sums is not None:
            sums.add_(next(found))
