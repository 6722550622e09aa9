"""The rounding errors of this call."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clearhead.engines.choose import choose
from clearhead.engines.operation import run
from clearhead.explanation.diagnosis.case import Case, Check, Findings
from clearhead.problem.arguments import as_score
from clearhead.problem.guard import guard
from clearhead.problem.problem import Problem, with_value
from clearhead.problem.record import frozen
from clearhead.problem.region import Region
from clearhead.problem.regions import cut
from clearhead.scores.base import ByTile

ROWS, SEQUENCES = 16, 2  # how many queries of how many sequences are computed again
# The largest error that is no finding, as a part of the largest value: eight roundings of an output of the dtype, and
# a thousand in float32, where the kernels add up thousands of terms.
MOST = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4}


class Precision(Check):
    """clearhead's output of some queries, compared to its output from the same inputs in float64.

    The error is the largest difference as a part of the largest value. It is a warning above 4e-3 in float16 and 3e-2
    in bfloat16 (eight roundings of an output), and above 1e-4 in float32 (a thousand roundings). In float16 and
    bfloat16 a smaller error is a note.
    """

    name = "precision"

    def find(self, case: Case) -> Findings:
        value, dtype = case.inputs.get("value"), case.inputs["query"].dtype
        if value is None or dtype not in MOST or not value.shape[-1]:
            return
        step = math.ceil(case.shape[2] / ROWS)
        region = Region(batch=slice(0, SEQUENCES), queries=slice(0, case.shape[2], step))
        part = cut(with_value(case.problem._replace(sizes=case.problem.sizes._replace(leading=None)), value), region)
        exact = _in_float64(part)
        counted = (case.real & case.seen[1])[region.batch, :, region.queries] & exact.isfinite().all(-1)
        largest = float(value.masked_fill(~value.isfinite(), 0.0).abs().max())
        if not largest or not bool(counted.any()):
            return
        own = run(part, choose(part, None), None)
        error = float((own.double() - exact).abs().amax(-1).masked_fill(~counted, 0.0).max()) / largest
        most, name = MOST[dtype], str(dtype).removeprefix("torch.")
        if error <= most and dtype == torch.float32:
            return
        remedy = "Nothing: this is rounding."
        if error > most:
            remedy = (
                "Compute this call in float32 or float64; normalise queries and keys, or take out an offset that all "
                "keys share: large scores lose the digits that tell keys apart."
            )
        yield self.finding(
            "note" if error <= most else "warning",
            f"In {name} clearhead's output of {int(counted.sum())} rows differs from that in float64 by {error:.2g} of "
            f"the largest value, {largest:.3g}; {most:.0e} is what rounding explains.",
            remedy,
        )


def _in_float64(problem: Problem) -> Tensor:
    """The output of the same problem, from the same numbers, computed in float64."""

    def wide(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or not tensor.is_floating_point() else tensor.detach().double()

    scores, bias = problem.scores, problem.bias
    query, key = scores.query.double(), scores.key.double()
    if isinstance(scores, ByTile):
        doubled = frozen(scores.score, lambda t: t.detach().double() if t.is_floating_point() else t.detach().clone())
        scores = scores._replace(query=query, key=key, score=as_score(doubled.double()))
    else:
        scores = scores._replace(query=query, key=key, weight=wide(scores.weight))
    if bias is not None:
        bias = bias._replace(dense=wide(bias.dense), relative=wide(bias.relative))
    exact = problem._replace(scores=scores, value=wide(problem.value), bias=bias, sinks=wide(problem.sinks))
    exact = guard(exact)
    return run(exact, choose(exact, "tiled"), "tiled")
