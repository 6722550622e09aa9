"""Any score, any mask, any device, in memory that grows with the length and not with its square."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clearhead import _tiles
from clearhead._problem import Problem, guard
from clearhead._tiles import Block
from clearhead.engines.base import Engine
from clearhead.scores.base import accumulated

BUDGET = 2**21  # elements of a block's scores, or of what is made on the way to them
LOOK = 2**20  # the same for an inspection, which makes a few passes over each block: it should stay in the cache


class Tiled(Engine):
    """PyTorch operations over blocks of queries, keys sliced to the block's spans; the backward computes blocks again.

    Each block is checkpointed, so one block's scores exist at a time, forward and backward, and second derivatives
    are autograd's own.
    """

    name = "tiled"

    def objections(self, problem: Problem) -> list[str]:
        return []

    def run(self, problem: Problem) -> Tensor:
        problem = guard(problem)
        value = problem.value
        assert value is not None
        sizes = problem.sizes
        every = list(_tiles.blocks(problem, BUDGET))
        if not every or not sizes.keys:
            return _tiles.no_keys(problem, problem.query)
        if len(every) > 1 and problem.needs_grad:
            stamp = problem.stamp()
            parts = [
                checkpoint(_again, problem, block, stamp, use_reentrant=False, preserve_rng_state=False)
                for block in every
            ]
        else:
            parts = [_block(problem, block) for block in every]
        return _tiles.assemble(parts, every)

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


def _again(problem: Problem, block: Block, stamp: tuple[int, ...]) -> Tensor:
    """A block, computed in the forward pass and again in the backward, from the same numbers."""
    problem.check_stamp(stamp)
    return _block(problem, block)


def _block(problem: Problem, block: Block) -> Tensor:
    """The output of one block's rows: all the keys they may see are in it."""
    assert problem.value is not None
    may_be_empty = _tiles.may_be_empty(problem, block)
    tile = _tiles.scores(problem, block)
    if not tile.shape[-1]:
        return _tiles.no_keys(problem, problem.query[block.batch, block.heads, block.queries])
    weights = _tiles.softmax(tile, may_be_empty)
    value = _tiles.head_part(problem.value, problem.groups, block)[:, :, block.keys]
    return _tiles.grouped_product(weights, value.to(weights.dtype)).to(value.dtype)
