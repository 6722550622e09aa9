"""Where a call of a running model stands in the whole sequence."""

from __future__ import annotations

from torch import Tensor

from clearhead.base.errors import UnsupportedError
from clearhead.models._modules import Running
from clearhead.models.edits.spot import Spot
from clearhead.problem.problem import Problem


def spot_of(problem: Problem, running: Running, name: str) -> Spot:
    """By the model's cache, which counts its tokens; else by the call's alignment; else by what its last query sees."""
    sizes = problem.sizes
    queries, keys, heads = sizes.queries, sizes.keys, sizes.heads
    told = isinstance(sizes.align, int | Tensor)
    total = None if told else running.tokens
    if not told and (running.kind == "cross" or queries > keys):
        first = 0 if total is None else total - queries
        return Spot(range(first, first + queries), range(keys), keys, range(heads), heads)
    if total is None and sizes.align == "upper_left":  # a mask may hide the keys after the last query; they are there
        return Spot(range(queries), range(keys), keys, range(heads), heads)
    if total is None:
        total = _first(problem, name) + queries
    before = 0 if told else max(total - keys, 0)  # what a sliding window has left behind
    return Spot(range(total - queries, total), range(before, before + keys), min(total, keys), range(heads), heads)


def _first(problem: Problem, name: str) -> int:
    """The position of the first query."""
    sizes = problem.sizes
    align = sizes.align
    if isinstance(align, Tensor):
        if align.numel() > 1 and bool((align != align.reshape(-1)[0]).any()):
            raise UnsupportedError(
                f"{name} was called for sequences whose queries stand at different positions, {align.tolist()}: an "
                "edit names one position for all. Run the sequences one by one."
            )
        return int(align.reshape(-1)[0])
    if isinstance(align, int):
        return align
    if sizes.queries == sizes.keys:
        return 0
    if problem.spans is not None and sizes.queries:
        last = int(problem.spans.stop[..., -1].max())  # a static cache has slots behind the last query
        return max(last - sizes.queries, 0)
    return sizes.keys - sizes.queries
