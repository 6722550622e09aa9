"""How much of the attention goes to sinks: to the first key, and to a head's own sink."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from clearhead.inspection.reductions.base import Reduction, arange
from clearhead.inspection.reductions.sink_share import SinkShare
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Found, Summary
from clearhead.problem.unseen import seen


@dataclass(frozen=True)
class ToSinks(Reduction):
    """The share of each query's softmax that goes to its sequence's first key, and to its head's sink, if it has one.

    Formula: p_i = w_if + 1 − Σ_j w_ij, f the first key that any query of the sequence may see. Gives (B, H, Lq).
    """

    along = "queries"

    def summary(self, problem: Problem) -> Summary:
        return Summary(groups=_first_key(problem), rows=problem.sinks is not None)

    def found(self, found: Found, problem: Problem) -> Tensor:
        assert found.groups is not None
        share = found.groups[..., 0]
        return share if problem.sinks is None else share + SinkShare().found(found, problem)


def _first_key(problem: Problem) -> Tensor:
    """(B or 1, Lk, 1): 1 for the first key that some query of the sequence may see."""
    sizes = problem.sizes
    place = arange(sizes.keys, sizes.device)
    if problem.spans is None:
        first = place == 0
        return first.to(problem.key.dtype).view(1, -1, 1)
    keys = seen(problem.spans, sizes)[0].any(1)  # (B or 1, Lk)
    first = keys & (keys.cumsum(-1) == 1)
    return first.to(problem.key.dtype).unsqueeze(-1)
