"""Few queries of grouped heads: the query heads of a key head become rows of one tile, which reads each key once."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from clearhead.base.kept import Memo
from clearhead.biases.base import Added
from clearhead.engines.triton.blocks import SHARED
from clearhead.problem.problem import Problem
from clearhead.problem.visible import Visible


def grouped(problem: Problem) -> Problem:
    """Return the problem whose query heads are further queries of their key head, (B, Hk, G · Lq, E), without sinks.

    Row g · Lq + i is query i of the group's head g, so results have the memory layout of the heads. The problem stays
    as it is if there are no groups, if there are many queries, and if the kernels need a row's index among the heads:
    for dropout's hash, and for a bias by distance of several queries.
    """
    sizes, groups, added = problem.sizes, problem.groups, problem.bias
    rows = groups * sizes.queries
    by_distance = added is not None and added.relative is not None
    if groups == 1 or rows > SHARED or problem.seed is not None:
        return problem
    if by_distance and (sizes.queries > 1 or (added is not None and added.dense is not None)):
        return problem

    def folded(tensor: Tensor) -> Tensor:
        """Reshape (B, H, Lq, …) to (B, Hk, G · Lq, …); a size of 1 that repeats stays 1 if it can."""
        batch, heads, length, *rest = tensor.shape
        if heads == length == 1:
            return tensor
        every = tensor.expand(batch, groups if heads == 1 else heads, sizes.queries, *rest)
        return every.reshape(batch, every.shape[1] // groups, rows, *rest)

    scores = problem.scores._replace(query=folded(problem.query))
    if added is not None:
        # with one query, the bias by distance is a bias by key
        dense = added.dense if added.relative is None else added.relative.unsqueeze(2)
        added = Added(None if dense is None else folded(dense))
    poison = None if problem.poison is None else (folded(problem.poison[0]), problem.poison[1])
    visible = None if problem.visible is None else _visible(problem.visible, folded, rows)
    sizes = sizes._replace(heads=problem.key.shape[1], queries=rows)
    return problem._replace(scores=scores, sizes=sizes, bias=added, poison=poison, visible=visible, sinks=None)


def _visible(visible: Visible, folded: Callable[[Tensor], Tensor], rows: int) -> Visible:
    """Return the mask of the folded rows, cached with the mask: see `ranges`."""

    def make() -> Visible:
        spans = visible.spans
        gaps = None if spans.gaps is None else (folded(spans.gaps[0]), folded(spans.gaps[1]))
        spans = spans._replace(start=folded(spans.start), stop=folded(spans.stop), gaps=gaps)
        return visible._replace(spans=spans, memo=Memo())

    return visible.memo.derive(("triton, grouped", rows), make)
