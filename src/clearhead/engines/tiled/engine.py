"""An engine for any score, mask and device, whose memory grows with the length and not with its square."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.tracing import compiling, dispatches, looked_into
from clearhead.engines.base import Cost, Engine
from clearhead.engines.tiled import tiles
from clearhead.engines.tiled.backward import gradients
from clearhead.engines.tiled.checkpoints import checkpointed
from clearhead.problem import regions
from clearhead.problem.guard import guard
from clearhead.problem.packing import Operands, operands
from clearhead.problem.partial import Partial, Rows
from clearhead.problem.problem import Problem
from clearhead.problem.region import Region
from clearhead.problem.regions import cut
from clearhead.problem.summary import Sent, Summary

FOLLOWED = 2  # times regions.BUDGET, for each thread


class Tiled(Engine):
    """PyTorch operations over blocks of queries, with keys sliced to the block's spans.

    The backward pass computes the blocks again. One block's scores exist at a time, forward and backward. A score that
    is no `Pairwise`, or a bias by a function, is differentiated by autograd, through checkpoints of the blocks. So are
    second derivatives.
    """

    name = "tiled"

    def objections(self, problem: Problem) -> list[str]:
        return []

    def transparent(self, problem: Problem) -> bool:
        # the tensors that a score by tile() or a function closes over are unknown: autograd finds them
        if problem.lowered is None or problem.by_function or looked_into():
            return True
        return any(t is not None and dispatches(t) for t in operands(problem))

    def notes(self, problem: Problem) -> list[str]:
        if problem.lowered is not None:
            return []
        return [
            "the score has tile() alone, so its gradients come from autograd: through PyTorch's operations, block by "
            "block, and each block's scores are computed once more in the backward pass. Memory is counted as if it "
            f"made {regions.width(problem)} numbers a pair on the way. A score that is a sum over dimensions gets "
            "fused kernels, with gradients of their own, by lower(): see Pairwise"
        ]

    def forward(self, problem: Problem, rows: bool = False) -> Partial:
        problem = tiles.widened(guard(problem))
        every = list(regions.walk(problem, _budget(problem)))
        if not rows and (not every or not problem.sizes.keys):
            return Partial(tiles.no_keys(problem, problem.query))
        if rows:
            return _in_blocks(problem, every)
        # transforms and forward mode follow plain operations, but no checkpoints
        again = problem.needs_grad and not looked_into() and len(every) > 1
        run = checkpointed(problem, every, lambda part, _: tiles.partial(part)) if again else None

        def compute(region: Region) -> Tensor:
            seen = regions.parts_seen(problem, region)
            parts = [run(part) if run else tiles.partial(cut(problem, part)) for part in seen]
            return _whole(parts, problem, region).output

        return Partial(regions.assemble([compute(region) for region in every], every))

    def backward(
        self, problem: Problem, rows: Rows, grad: Tensor | None, wanted: tuple[bool, ...], sent: Sent | None = None
    ) -> Operands:
        return gradients(problem, rows, grad, wanted, sent or Sent())

    def fuses(self, problem: Problem, summary: Summary) -> bool:
        return 0 not in problem.sizes.shape  # its pass over blocks, with gradients that are written out

    def cost(self, problem: Problem) -> Cost:
        every = list(regions.walk(problem, _budget(problem)))
        areas = [part.area for region in every for part in regions.parts_seen(problem, region)]
        numbers = 3 * regions.width(problem) * max(areas, default=0)
        return Cost(sum(areas), accumulated(problem.query.dtype).itemsize * numbers)


def _budget(problem: Problem) -> int:
    """How many elements a block's work memory has. Where autograd follows each operation, and so runs one block after
    another, a block is larger, so that the part of each thread fills its cache."""
    if problem.lowered is not None or not problem.needs_grad:
        return regions.BUDGET
    return FOLLOWED * regions.BUDGET * (1 if compiling() else min(torch.get_num_threads(), 4))


def _in_blocks(problem: Problem, every: list[Region]) -> Partial:
    """The output and the rows of a guarded problem, without autograd. With a checkpoint for each block, the output and
    the graph of a block would lie between the scores of two blocks, and fragment the memory."""
    assert problem.value is not None
    lead, width = problem.query.shape[:3], problem.value.shape[-1]
    new = problem.query.new_zeros
    dtype = accumulated(problem.query.dtype)
    output, maximum, log_sum = (new(size, dtype=dtype) for size in ((*lead, width), lead, lead))
    log_sum.fill_(torch.inf)
    for region in every:
        if region.keys.stop > region.keys.start:
            parts = [tiles.partial(cut(problem, part)) for part in regions.parts_seen(problem, region)]
            at = region.sides[:3]
            output[at], maximum[at], log_sum[at] = _whole(parts, problem, region)[:3]  # type: ignore[assignment]
    return Partial(output, maximum, log_sum)


def _whole(parts: list[Partial], problem: Problem, region: Region) -> Partial:
    """The parts of the keys of some rows, merged, with the sinks."""
    found = functools.reduce(Partial.merge, parts)
    sinks = tiles.sinks(problem)
    return found if sinks is None else found.with_sinks(sinks[region.heads])


PLAIN = Tiled()  # its blocks are operations of PyTorch's, which can be differentiated again
