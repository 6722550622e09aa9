"""The output of each backend, compared with the formula on the same inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from clearhead.base.errors import UnsupportedError
from clearhead.base.text import said
from clearhead.inspection.reductions.log_sum_exp import LogSumExp
from clearhead.inspection.reductions.max_score import MaxScore
from clearhead.inspection.reductions.output import Output
from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.models.attention_call import AttentionCall
from clearhead.models.calls import Calls
from clearhead.models.table import Table
from clearhead.models.tap.layers import FIRST, LayerName

# The error of an output by rounding, as a part of the largest value, where scores are about 0. Scores are rounded to
# the inputs' dtype too, in proportion to their size; eager attention of float64 has a softmax in float32.
ROUNDING = {torch.float64: 1e-6, torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class ComparedCall:
    """A backend's output of one call, compared with the formula on that call's own inputs.

    `number`: which call of the run it is. `error`: the largest difference of a number of the output, as a part of the
    largest number of `value`, over the queries that see a key and are no padding; `sequence`, `head`, `query`: its
    place. `departs`: whether the error is above `tolerance`, or NaN.
    """

    name: str
    kind: Literal["self", "cross"]
    backend: str
    number: int
    error: float
    tolerance: float
    sequence: int
    head: int
    query: int
    run: int = 0
    layer: LayerName = FIRST

    @property
    def departs(self) -> bool:
        return not self.error <= self.tolerance

    @property
    def row(self) -> dict[str, Any]:
        """The call's row of `Comparison.table`."""
        same = {
            "layer": self.layer.column,
            "call": self.number,
            "module": self.name,
            "kind": self.kind,
            "backend": self.backend,
        }
        return same | {"error": self.error, "tolerance": self.tolerance, "departs": self.departs}


class Comparison(Calls[ComparedCall]):
    """The calls of two backends, compared with their formula. `compare_backends` gives it.

    `calls`: the calls of both backends, each a `ComparedCall`. They are found as in a `Recording`, by number, module
    and run, where a run is a backend. `first`: the first call that departs from its formula; None where none does.
    """

    @property
    def first(self) -> ComparedCall | None:
        """The earliest call that departs from its formula; where both backends do, the call with the larger error."""
        wrong = [call for call in self.calls if call.departs]
        return min(wrong, key=lambda call: (call.number, call.error == call.error, -call.error), default=None)

    def ok(self) -> bool:
        """Whether both backends compute their formula in every call."""
        return self.first is None

    def table(self) -> Table:
        """A row for each call of each backend, as `pandas.DataFrame` takes them.

        Its columns: layer, call (its number), module, kind, backend, error, tolerance, departs.
        """
        return Table(call.row for call in self.calls)

    def __str__(self) -> str:
        return said(self, self._said)

    def _said(self) -> str:
        first = self.first
        by_backend = [
            f"  {run.calls[0].backend}: {sum(call.departs for call in run.calls)} of {len(run.calls)} calls depart, "
            f"the largest error is {max(run.calls, key=lambda call: (call.error != call.error, call.error)).error:.2g}"
            for run in self.runs
        ]
        if first is None:
            return "\n".join(["Both backends compute their formula in every call.", *by_backend])
        lines = [
            f"{first.backend} departs from its formula first in {first.layer}, {first.name}:",
            f"  an error of {first.error:.2g} of the largest value, where {first.tolerance:.2g} is rounding, at head "
            f"{first.head}, query {first.query} of sequence {first.sequence}",
            *by_backend,
            "  On these inputs the backend computed something other than the scale, softcap, mask, bias and sinks that "
            "the model passed to it.",
        ]
        return "\n".join(lines)


@torch.no_grad()
def compared(call: AttentionCall, number: int, backend: str, run: int, tolerance: float | None) -> ComparedCall:
    """A call that was watched with its values, compared with its formula."""
    output, value = call.output, call.value
    assert value is not None and call.outcome is not None
    if call.outcome.output is None:
        raise UnsupportedError(f"{call.name} gives no output by head that could be compared with the formula.")
    weights = Weights(FromRecord(call.record, {}), "tiled")  # plain operations: no backend's kernel
    wide = value if value.dtype == torch.float64 else value.float()
    formula, rows, scores = weights.reduce(Output(wide), LogSumExp(), MaxScore())
    off = (output.to(formula.dtype) - formula).abs().amax(-1) if value.shape[-1] else torch.zeros_like(rows)
    counted = _counted(call, rows)
    share = (off / (_largest(wide) or 1.0)).masked_fill(~counted, 0.0)
    place = int(share.flatten().argmax()) if share.numel() else 0
    at = np.unravel_index(place, tuple(share.shape)) if share.numel() else (0, 0, 0)
    sequence, head, query = (int(i) for i in at)
    error = float(share.flatten()[place]) if share.numel() else 0.0
    if tolerance is None:
        coarsest = max(ROUNDING[t.dtype] for t in (call.query, value, output))  # under autocast they may differ
        tolerance = coarsest * (1 + _largest(scores.masked_fill(~counted, 0.0)) / 4)
    return ComparedCall(call.name, call.kind, backend, number, error, tolerance, sequence, head, query, run, call.layer)


def _counted(call: AttentionCall, rows: Tensor) -> Tensor:
    """The queries, bool (B, H, Lq), that see a key, by their log-sum-exps `rows`, and are no padding."""
    counted = rows != -torch.inf
    if call.uniform is not None:
        counted = counted & ~call.uniform[..., 0]
    if call.padding is not None and call.padding.queries is not None:
        counted = counted & call.padding.queries.unsqueeze(1)
    return counted


def _largest(value: Tensor) -> float:
    """The largest absolute value of the finite numbers."""
    finite = value.abs().masked_fill(~value.isfinite(), 0.0)
    return float(finite.max()) if finite.numel() else 0.0
