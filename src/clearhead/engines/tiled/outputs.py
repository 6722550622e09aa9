"""The output of a problem, block by block: without a graph, or with one of checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.engines.tiled import tiles
from clearhead.engines.tiled.checkpoints import checkpointed
from clearhead.problem import regions
from clearhead.problem.partial import Partial
from clearhead.problem.problem import Problem
from clearhead.problem.region import Region
from clearhead.problem.regions import cut


def followed(problem: Problem, every: list[Region], again: bool) -> Tensor:
    """The output of a guarded problem in operations that autograd follows. `again`: it computes each block once more in
    the backward pass."""
    run = checkpointed(problem, every, lambda part, _: tiles.partial(part)) if again else _once(problem)

    def compute(region: Region) -> Partial:
        parts = [run(part) for part in regions.parts_seen(problem, region)]
        return _whole(parts, problem, region)

    return regions.assemble([compute(region).output for region in every], every)


def _once(problem: Problem) -> Callable[[Region], Partial]:
    return lambda region: tiles.partial(cut(problem, region))


def in_blocks(problem: Problem, every: list[Region]) -> Partial:
    """The output and the rows of a guarded problem, without autograd. With a checkpoint for each block, the output and
    the graph of a block would lie between the scores of two blocks, and fragment the memory."""
    assert problem.value is not None
    lead, width = problem.query.shape[:3], problem.value.shape[-1]
    new = problem.query.new_zeros
    dtype = accumulated(problem.query.dtype)
    output, maximum, log_sum = (new(size, dtype=dtype) for size in ((*lead, width), lead, lead))
    log_sum.fill_(torch.inf)
    run = _once(problem)
    for region in every:
        if region.keys.stop > region.keys.start:
            parts = [run(part) for part in regions.parts_seen(problem, region)]
            at = region.sides[:3]
            output[at], maximum[at], log_sum[at] = _whole(parts, problem, region)[:3]  # type: ignore[assignment]
    return Partial(output, maximum, log_sum)


def _whole(parts: list[Partial], problem: Problem, region: Region) -> Partial:
    """The parts of the keys of some rows, merged, with the sinks."""
    found = functools.reduce(Partial.merge, parts)
    sinks = tiles.sinks(problem)
    return found if sinks is None else found.with_sinks(sinks[region.heads])
