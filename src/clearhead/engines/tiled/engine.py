"""Any score, any mask, any device, in memory that grows with the length and not with its square."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.tracing import dispatches, looked_into
from clearhead.engines.base import Cost, Engine
from clearhead.engines.tiled import tiles
from clearhead.engines.tiled.backward import gradients
from clearhead.engines.tiled.checkpoints import checkpointed
from clearhead.problem import regions
from clearhead.problem.packing import Operands, operands
from clearhead.problem.partial import Partial, Rows
from clearhead.problem.problem import Problem, guard
from clearhead.problem.regions import cut
from clearhead.problem.summary import Sent


class Tiled(Engine):
    """PyTorch operations over blocks of queries, keys sliced to the block's spans; the backward computes blocks again.

    One block's scores exist at a time, forward and backward. A score that is no `Pairwise`, or a bias by a function,
    is differentiated by autograd, through checkpoints of the blocks; so is every gradient, a second time.
    """

    name = "tiled"

    def objections(self, problem: Problem) -> list[str]:
        return []

    def transparent(self, problem: Problem) -> bool:
        # the tensors that a score by tile() or a function closes over are unknown: autograd finds them
        if problem.lowered is None or problem.by_function or looked_into():
            return True
        return any(t is not None and dispatches(t) for t in operands(problem))

    def forward(self, problem: Problem, rows: bool = False) -> Partial:
        problem = guard(problem)
        if rows:
            return _in_blocks(problem)
        every = list(regions.walk(problem, regions.BUDGET))
        if not every or not problem.sizes.keys:
            return Partial(tiles.no_keys(problem, problem.query))
        # transforms and forward mode follow plain operations, but no checkpoints
        again = problem.needs_grad and not looked_into() and len(every) > 1
        compute = (
            checkpointed(problem, lambda part, _: tiles.output(part))
            if again
            else lambda region: tiles.output(cut(problem, region))
        )
        return Partial(regions.assemble([compute(region) for region in every], every))

    def backward(
        self, problem: Problem, rows: Rows, grad: Tensor | None, wanted: tuple[bool, ...], sent: Sent | None = None
    ) -> Operands:
        assert grad is not None and sent is None, "autograd follows the blocks of statistics"
        return gradients(problem, rows, grad, wanted)

    def cost(self, problem: Problem) -> Cost:
        areas = [region.area for region in regions.walk(problem, regions.BUDGET)]
        numbers = 3 * regions.width(problem) * max(areas, default=0)
        return Cost(sum(areas), accumulated(problem.query.dtype).itemsize * numbers)


def _in_blocks(problem: Problem) -> Partial:
    """The output and the rows of a guarded problem, without autograd.

    With a checkpoint a block, the output and the graph of each block would lie between two blocks' scores, and fragment
    the memory.
    """
    assert problem.value is not None
    lead, width = problem.query.shape[:3], problem.value.shape[-1]
    new = problem.query.new_zeros
    dtype = accumulated(problem.query.dtype)
    output, maximum, log_sum = (new(size, dtype=dtype) for size in ((*lead, width), lead, lead))
    log_sum.fill_(torch.inf)
    for region in regions.walk(problem, regions.BUDGET):
        if region.keys.stop > region.keys.start:
            at = region.sides[:3]
            output[at], maximum[at], log_sum[at] = _block(cut(problem, region))
    return Partial(output, maximum, log_sum)


def _block(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Output, maximum and log_sum of a part that has all the keys that its queries may see."""
    assert problem.value is not None
    scores, sinks = tiles.scores(problem), tiles.sinks(problem)
    maximum = scores.amax(-1)
    blind = maximum == -torch.inf
    if sinks is not None:
        maximum = torch.maximum(maximum, sinks)
    maximum = maximum.masked_fill(blind, 0.0)
    weights = (scores - maximum.unsqueeze(-1)).exp_()
    total = weights.sum(-1)
    if sinks is not None:
        total += torch.exp(sinks - maximum)
    weights /= total.masked_fill(blind, 1.0).unsqueeze(-1)
    output = tiles.grouped_product(tiles.dropped(problem, weights), problem.value.to(weights.dtype))
    return output, maximum, total.log().masked_fill(blind, math.inf)


PLAIN = Tiled()  # its blocks are operations of PyTorch's, which can be differentiated again
