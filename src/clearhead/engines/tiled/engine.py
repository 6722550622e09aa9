"""The engine for any score, mask and device, whose memory grows linearly with the length."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.torch_state.tensor_kind import has_own_dispatch
from clearhead.engines.base import Cost, Engine
from clearhead.engines.tiled import tiles, user_functions
from clearhead.engines.tiled.backward import gradients
from clearhead.engines.tiled.blocks import followed, in_blocks
from clearhead.engines.tiled.user_functions import FOLLOWED
from clearhead.problem import regions
from clearhead.problem.guard import guard
from clearhead.problem.packing import Operands, operands
from clearhead.problem.partial import Partial, Rows
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Sent, Summary
from clearhead.scores.base import ByTile


class Tiled(Engine):
    """Engine of PyTorch operations over blocks of queries, with keys sliced to the spans of the block.

    The backward pass computes the blocks again, so one block's scores exist at a time, forward and backward. Autograd
    differentiates a score that is no `Pairwise`, and scores with a bias by a function (`user_functions.py`). Second
    derivatives go through checkpoints of the blocks.
    """

    name = "tiled"

    def objections(self, problem: Problem) -> list[str]:
        return []

    def transparent(self, problem: Problem) -> bool:
        # tensors that functions read are not operands: `user_functions` and autograd differentiate them
        if problem.lowered is None or problem.by_function or problem.mode.operations_only:
            return True
        return any(t is not None and has_own_dispatch(t) for t in operands(problem))

    def notes(self, problem: Problem) -> list[str]:
        if problem.lowered is not None and not problem.by_function:
            return []
        alone = isinstance(problem.scores, ByTile) and problem.scores.score.changed_by is None
        why = "the score has only tile()" if alone else "functions of positions compute a part of the scores"
        more = ". A score that is a sum over dimensions gets fused kernels and their gradients if it has lower()"
        return [
            f"{why}, so autograd computes the gradients of the scores, block by block, and the scores once more in "
            f"the backward pass. The memory is an estimate with {regions.width(problem)} intermediate numbers a pair"
            + more
            * alone
        ]

    def forward(self, problem: Problem, rows: bool = False) -> Partial:
        problem = tiles.widened(guard(problem))
        every = list(regions.walk(problem, _budget(problem)))
        if not rows and (not every or not problem.sizes.keys):
            return Partial(tiles.no_keys(problem, problem.query))
        mode = problem.mode
        if rows or not (problem.needs_grad or mode.operations_only or mode.compiled or mode.traced):
            return in_blocks(problem, every)
        # transforms and forward mode do not support checkpoints
        again = problem.needs_grad and not mode.operations_only and len(every) > 1
        output = user_functions.compute_output(problem, every) if again else None
        return Partial(followed(problem, every, again) if output is None else output)

    def backward(
        self, problem: Problem, rows: Rows, grad: Tensor | None, wanted: tuple[bool, ...], sent: Sent | None = None
    ) -> Operands:
        return gradients(problem, rows, grad, wanted, sent or Sent())

    def fuses(self, problem: Problem, summary: Summary) -> bool:
        return 0 not in problem.sizes.shape  # one pass over blocks, with the gradients of `backward.py`

    def cost(self, problem: Problem) -> Cost:
        every = list(regions.walk(problem, _budget(problem)))
        areas = [part.area for region in every for part in regions.parts_seen(problem, region)]
        numbers = 3 * regions.width(problem) * max(areas, default=0)
        return Cost(sum(areas), accumulated(problem.query.dtype).itemsize * numbers)


def _budget(problem: Problem) -> int:
    """Return the number of elements of a block's work memory.

    Blocks run one after another where autograd differentiates each operation; there a block is larger, so that the part
    of each thread fills its cache.
    """
    if problem.lowered is not None or not problem.needs_grad:
        return regions.BUDGET
    return FOLLOWED * regions.BUDGET * (1 if problem.mode.compiled else min(torch.get_num_threads(), 4))


PLAIN = Tiled()  # consists of PyTorch's operations, which are differentiable any number of times
