"""A problem block by block, without a graph or with a checkpoint for each block.

The backward pass computes each block again, so only one block's scores exist at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clearhead.base.arrays import accumulated, in_memory_still
from clearhead.base.errors import UnsupportedError
from clearhead.base.torch_state.mode import CURRENT
from clearhead.engines.tiled import tiles
from clearhead.problem import regions
from clearhead.problem.packing import Operands, operands, with_operands, without_operands
from clearhead.problem.partial import Partial
from clearhead.problem.problem import Problem
from clearhead.problem.region import EVERY, Region
from clearhead.problem.regions import cut

Result = TypeVar("Result")


def followed(problem: Problem, every: list[Region], again: bool) -> Tensor:
    """Compute the output of a guarded problem in operations that autograd differentiates.

    `again`: whether the backward pass computes each block once more.
    """
    run = checkpointed(problem, every, lambda part, _: tiles.partial(part)) if again else None
    return regions.assemble([_whole(problem, region, run).output for region in every], every)


def in_blocks(problem: Problem, every: list[Region]) -> Partial:
    """Compute the output and the rows of a guarded problem, without autograd.

    With a checkpoint for each block, the output and the graph of a block would lie between the scores of two blocks,
    and fragment the memory.
    """
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
    """Merge the parts of the keys of some rows, and add the sinks; `run` computes a part in a graph."""
    seen = regions.parts_seen(problem, region)
    parts = [tiles.partial(cut(problem, part)) if run is None else run(part) for part in seen]
    found = functools.reduce(Partial.merge, parts)
    sinks = tiles.sinks(problem)
    return found if sinks is None else found.with_sinks(sinks[region.heads])


def checkpointed(
    problem: Problem, every: Sequence[Region], compute: Callable[[Problem, Region], Result]
) -> Callable[[Region], Result]:
    """Return a function that runs `compute(part, region)` under a checkpoint; it is differentiable more than once."""
    problem = problem._replace(mode=CURRENT)  # each run of a part reads the mode again
    rest, reads, given = without_operands(problem), problem.reads(), operands(problem)
    # tensors of the same shapes without memory, from which mask, bias and dropout of a part are cut
    shapes = with_operands(problem, [None if t is None else t.new_empty(()).expand(t.shape) for t in given])
    groups = _split(given, every, problem.groups)

    def again(region: Region, *tensors: Tensor | None) -> Result:
        nonlocal reads
        reads.check()
        in_memory_still(tensors)
        try:  # a checkpoint stops its second run by an exception, once it has all tensors
            group = cut(shapes._refresh_mode(), Region(region.batch, region.heads))
            return compute(cut(with_operands(group, tensors), region._replace(batch=EVERY, heads=EVERY)), region)
        finally:
            before, reads = reads, rest.reads()  # a score may update its own running statistics without an error
            if before.has_replaced_tensor(reads):
                raise make_replaced_error()

    def run(region: Region) -> Any:
        tensors = groups[region.batch.start, region.heads.start]
        # functions may draw random numbers
        return checkpoint(again, region, *tensors, use_reentrant=False, preserve_rng_state=problem.calls_functions)

    return run


def make_replaced_error() -> UnsupportedError:
    """Make the error for a backward pass that reads other parameters than the forward pass."""
    return UnsupportedError(
        "the score or the bias of attention() reads other parameters in the backward pass than in the forward pass, "
        "as after torch.func.functional_call, so gradients would be wrong.\n"
        "Take gradients by torch.func.grad, or pass engine='reference'."
    )


def _split(given: Operands, every: Sequence[Region], groups: int) -> dict[tuple[int, int], Operands]:
    """Split the operands by the sequences and heads that blocks share, by the first sequence and the first head.

    One split is cheaper than slices: the gradient of a slice would have the size of the whole operand, for each block.
    """
    counts: dict[tuple[int, int], dict[int, int]] = {}  # the number of heads by the first head, for some sequences
    for region in every:
        of_heads = counts.setdefault((region.batch.start, region.batch.stop), {})
        of_heads[region.heads.start] = region.heads.stop - region.heads.start
    found = {}
    batches = _along(given, 0, [stop - start for start, stop in counts], 1)
    for ((first, _), of_heads), part in zip(counts.items(), batches, strict=True):
        for head, one in zip(of_heads, _along(part, 1, list(of_heads.values()), groups), strict=True):
            found[first, head] = one
    return found


def _along(given: Operands, dim: int, counts: list[int], groups: int) -> list[Operands]:
    """Split the operands along the batch, 0, or the heads, 1."""

    def parts(tensor: Tensor | None, dim: int, divided: int = 1) -> Sequence[Tensor | None]:
        if tensor is None or len(counts) == 1 or tensor.shape[dim] == 1:
            return [tensor] * len(counts)
        return torch.split(tensor, [count // divided for count in counts], dim)

    query, key, value = parts(given.query, dim), parts(given.key, dim, groups), parts(given.value, dim, groups)
    dense, relative = parts(given.dense, dim), parts(given.relative, dim)
    sinks = parts(given.sinks, 0) if dim else [given.sinks] * len(counts)
    each = zip(query, key, value, [given.weight] * len(counts), dense, relative, sinks, strict=True)
    return [Operands(*one) for one in each]
