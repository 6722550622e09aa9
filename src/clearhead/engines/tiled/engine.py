"""Any score, any mask, any device, in memory that grows with the length and not with its square."""

from __future__ import annotations

from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.tracing import compiling, dispatches, forward_mode, transformed
from clearhead.engines.base import Engine
from clearhead.engines.differentiable import Kept, Step, checkpointed, in_plain_operations, output_of, run
from clearhead.engines.tiled import tiles
from clearhead.engines.tiled.backward import Operands, gradients, operands
from clearhead.problem import regions
from clearhead.problem.problem import Problem, guard
from clearhead.problem.regions import cut


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
        every = list(regions.walk(problem, regions.BUDGET))
        if not every or not problem.sizes.keys:
            return tiles.no_keys(problem, problem.query)
        # transforms and forward mode look into plain operations, and take no checkpoints
        if len(every) == 1 or not problem.needs_grad or transformed() or forward_mode():
            return in_plain_operations(problem)
        if problem.lowered is None or compiling() or any(t is not None and dispatches(t) for t in operands(problem)):
            return checkpointed(problem)  # what the score closes over is unknown: autograd finds it
        return run(problem, _Blocks())

    def pairs(self, problem: Problem) -> int:
        return sum(region.area for region in regions.walk(problem, regions.BUDGET))

    def extra_bytes(self, problem: Problem) -> int:
        width = regions.width(problem)
        largest = max((region.area * width for region in regions.walk(problem, regions.BUDGET)), default=0)
        return 3 * accumulated(problem.query.dtype).itemsize * largest


def gradients_of(problem: Problem, wanted: tuple[bool, ...], grad: Tensor) -> Operands:
    """The gradients to the operands of a lowered problem, from that of its output."""
    problem = guard(problem)
    return gradients(problem, list(regions.walk(problem, regions.BUDGET)), wanted, grad)


class _Blocks(Step):
    """All blocks as one step for autograd, which leaves nothing behind but the output.

    With a checkpoint a block, each block leaves its output and its graph between two blocks' scores, and the memory
    between them is split up and lost to the next: measured, 1.1 GiB at 16,384 queries where 0.1 is in use.
    """

    def forward(self, problem: Problem) -> tuple[Tensor, Kept]:
        assert problem.value is not None
        out = problem.query.new_empty(*problem.query.shape[:3], problem.value.shape[-1])
        for region in regions.walk(problem, regions.BUDGET):
            out[region.batch, region.heads, region.queries] = output_of(cut(problem, region))
        return out, ()

    def backward(self, problem: Problem, wanted: tuple[bool, ...], grad: Tensor, kept: Kept) -> Operands:
        return gradients(problem, list(regions.walk(problem, regions.BUDGET)), wanted, grad)
