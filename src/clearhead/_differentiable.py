"""The output block by block, in operations of PyTorch's: what autograd may differentiate as often as it likes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clearhead import _tiles
from clearhead._backward import Operands, with_operands
from clearhead._problem import Problem
from clearhead._tiles import Block


def block_output(problem: Problem, block: Block) -> Tensor:
    """The output of one block's rows: all the keys they may see are in it."""
    assert problem.value is not None
    if block.keys.stop <= block.keys.start:
        return _tiles.no_keys(problem, problem.query[block.batch, block.heads, block.queries])
    weights = _tiles.weights(problem, block, _tiles.scores(problem, block))
    value = _tiles.head_part(problem.value, problem.groups, block)[:, :, block.keys]
    weights = _tiles.dropped(problem, block, weights)
    return _tiles.grouped_product(weights, value.to(weights.dtype)).to(value.dtype)


def checkpointed(problem: Problem, every: list[Block]) -> Tensor:
    """Each block under a checkpoint: autograd computes it again, and may differentiate that in turn."""
    stamp = problem.stamp()

    def again(block: Block) -> Tensor:
        problem.check_stamp(stamp)
        return block_output(problem, block)

    parts = [checkpoint(again, block, use_reentrant=False, preserve_rng_state=False) for block in every]
    return _tiles.assemble(parts, every)


def differentiated_again(
    problem: Problem, every: list[Block], tensors: Operands, needed: tuple[bool, ...], grad: Tensor
) -> Operands:
    """The gradients to the operands, joined to them and to `grad`, so that they can be differentiated in turn."""
    wanted = [t for t, need in zip(tensors, needed, strict=True) if need and t is not None]
    out = checkpointed(with_operands(problem, tensors), every)
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return tuple(next(found) if need else None for need in needed)
