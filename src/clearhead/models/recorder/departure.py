"""How far the output of a call is from the formula of its record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.inspection.reductions.by_query import LogSumExp, MaxScore, Output
from clearhead.inspection.source import FromRecord, Source
from clearhead.inspection.weights import Weights
from clearhead.models.recordings.attention_call import AttentionCall

# The error of an output by rounding, as a part of the largest value, where scores are about 0. Scores are rounded to
# the inputs' dtype too, in proportion to their size; eager attention of float64 has a softmax in float32.
ROUNDING = {torch.float64: 1e-6, torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


class Departure(NamedTuple):
    """The largest difference of a number of the output, as a part of the largest value, and what counts as rounding.

    `at`: its sequence, head and query. Queries that see no key, and padding, do not count: functions differ there.
    """

    error: float
    tolerance: float
    at: tuple[int, int, int]

    @property
    def departs(self) -> bool:
        return not self.error <= self.tolerance


@torch.no_grad()
def departure(source: Source, value: Tensor, output: Tensor, left_out: Sequence[Tensor | None] = ()) -> Departure:
    """Compare an output (B, H, Lq, Ev) with the weights of a call times its value (B, Hk, Lk, Ev).

    `left_out`, bool, each broadcasts to (B, H, Lq): queries that do not count, beside those that see no key.
    """
    weights = Weights(source, "tiled")  # plain operations: no backend's kernel
    wide = value if value.dtype == torch.float64 else value.float()
    formula, rows, scores = weights.reduce(Output(wide), LogSumExp(), MaxScore())
    off = (output.to(formula.dtype) - formula).abs().amax(-1) if value.shape[-1] else torch.zeros_like(rows)
    uncounted = rows == -torch.inf
    for some in left_out:
        uncounted = uncounted if some is None else uncounted | some
    share = (off / (_largest(wide) or 1.0)).masked_fill(uncounted, 0.0)
    error, at = 0.0, (0, 0, 0)
    if share.numel():
        sequence, head, query = map(int, np.unravel_index(int(share.argmax()), tuple(share.shape)))
        error, at = float(share[sequence, head, query]), (sequence, head, query)
    dtypes = weights.problem.query.dtype, value.dtype, output.dtype  # under autocast they may differ
    tolerance = max(map(ROUNDING.__getitem__, dtypes)) * (1 + _largest(scores.masked_fill(uncounted, 0.0)) / 4)
    return Departure(error, tolerance, at)


def of_call(call: AttentionCall, value: Tensor, output: Tensor) -> Departure:
    """The same for a recorded call, whose padding, and queries with uniform weights, do not count."""
    words = None if call.padding is None else call.padding.queries
    uniform = None if call.uniform is None else call.uniform[..., 0]
    return departure(FromRecord(call.record, {}), value, output, (uniform, None if words is None else ~words[:, None]))


def _largest(value: Tensor) -> float:
    """The largest absolute value of the finite numbers."""
    finite = value.abs().masked_fill(~value.isfinite(), 0.0)
    return float(finite.max()) if finite.numel() else 0.0
