"""A part of a problem computed again in the backward pass, so that one part's scores exist at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clearhead.problem.packing import operands, with_operands, without_operands
from clearhead.problem.problem import Problem
from clearhead.problem.region import Region
from clearhead.problem.regions import cut

Result = TypeVar("Result")


def checkpointed(problem: Problem, compute: Callable[[Problem, Region], Result]) -> Callable[[Region], Result]:
    """`compute(part, region)` under a checkpoint, which can be differentiated more than once."""
    rest, reads, tensors = without_operands(problem), problem.reads(), operands(problem)
    draws = problem.lowered is None  # its tile() may draw random numbers

    def again(region: Region, *tensors: Tensor | None) -> Result:
        nonlocal reads
        reads.check()
        try:  # a checkpoint stops its second run once it has all that it needs
            return compute(cut(with_operands(rest, tensors), region), region)
        finally:
            reads = rest.reads()  # a score may write to its own buffers, such as running statistics: that is no error

    def run(region: Region) -> Any:
        return checkpoint(again, region, *tensors, use_reentrant=False, preserve_rng_state=draws)

    return run
