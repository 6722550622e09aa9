"""How far an output of attention is from softmax(scores) · value."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.inspection.reductions.by_query import LogSumExp, MaxScore, Output
from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.problem.problem import Problem
from clearhead.problem.record import now

# The largest `Deviation.ratio` that is rounding. Healthy backends gave at most 0.25 in half precision, and 1.5 in
# float32; a window of 1,024 keys that is wrong by one key gives 1 in bfloat16, and 70,000 in float32. Eager attention
# of float64 has a softmax in float32.
LARGEST_RATIO = {torch.float64: 32.0, torch.float32: 32.0, torch.float16: 0.6, torch.bfloat16: 0.6}


class Deviation(NamedTuple):
    """The row of a call whose output is farthest from a formula, as a multiple of its expected rounding.

    `ratio`: |output − formula| ÷ (ε (|formula| + (1 + max|s|) √(max w · Σ_j w_j |v_j|²))), of the row's vectors: the
    rounding of the result, and of each weight and score. `row`: its sequence, head and query. `limit`: the largest
    ratio that is rounding, by the coarsest dtype.
    """

    ratio: float
    row: tuple[int, int, int]
    limit: float

    @property
    def is_rounding(self) -> bool:
        return self.ratio <= self.limit


@torch.no_grad()
def measure_deviation(problem: Problem, value: Tensor, output: Tensor, uncounted: Tensor | None) -> Deviation:
    """Compare an output (B, H, Lq, Ev) with softmax(scores) · value, row by row.

    `uncounted`: rows that are left out, bool, which broadcasts to (B, H, Lq), beside fully masked rows.
    """
    weights = Weights(FromRecord(now(problem), {}), "tiled")  # plain operations: the kernel of no backend
    wide = value if value.dtype == torch.float64 else value.float()
    both = torch.cat([wide, wide.square().sum(-1, keepdim=True)], -1)
    found, lse, best = weights.reduce(Output(both), LogSumExp(), MaxScore())
    formula, squares = found[..., :-1], found[..., -1]
    largest = torch.exp(best - lse)
    rounding = formula.norm(dim=-1) + (1 + best.abs()) * (largest * squares).sqrt()
    dtypes = problem.query.dtype, value.dtype, output.dtype  # under autocast they may differ
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    eps, limit = max(torch.finfo(coarsest).eps, torch.finfo(torch.float32).eps), LARGEST_RATIO[coarsest]
    ratio = (output.to(formula.dtype) - formula).norm(dim=-1) / (eps * rounding).clamp_min(1e-30)
    ignored = lse == -torch.inf
    ratio = ratio.masked_fill(ignored if uncounted is None else ignored | uncounted, 0.0).nan_to_num(torch.inf)
    if not ratio.numel():
        return Deviation(0.0, (0, 0, 0), limit)
    place = int(ratio.flatten().argmax())
    sequence, head, query = map(int, np.unravel_index(place, tuple(ratio.shape)))
    return Deviation(float(ratio.flatten()[place]), (sequence, head, query), limit)
