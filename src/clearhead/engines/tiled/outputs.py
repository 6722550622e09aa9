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
    run = checkpointed(problem, every, lambda part, _: tiles.partial(part)) if again else None
    return regions.assemble([_whole(problem, region, run).output for region in every], every)


def in_blocks(problem: Problem, every: list[Region]) -> Partial:
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
            at = region.sides[:3]
            output[at], maximum[at], log_sum[at] = _whole(problem, region)[:3]  # type: ignore[assignment]
    return Partial(output, maximum, log_sum)


def _whole(problem: Problem, region: Region, run: Callable[[Region], Partial] | None = None) -> Partial:
    """The parts of the keys of some rows, merged, with the sinks. `run`: what computes a part in a graph."""
    seen = regions.parts_seen(problem, region)
    parts = [tiles.partial(cut(problem, part)) if run is None else run(part) for part in seen]
    found = functools.reduce(Partial.merge, parts)
    sinks = tiles.sinks(problem)
    return found if sinks is None else found.with_sinks(sinks[region.heads])
