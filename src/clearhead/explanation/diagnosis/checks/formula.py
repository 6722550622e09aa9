"""An output that the backend did not compute by the formula of the call."""

from __future__ import annotations

import math

from clearhead.explanation.diagnosis.case import PAIRS, Case, Check, Findings
from clearhead.inspection.deviation import measure_deviation
from clearhead.problem.region import Region
from clearhead.problem.regions import cut


class OtherFormula(Check):
    """The output of a recorded call, compared with softmax(scores) · value of its own inputs and mask, row by row.

    An error where a row is farther from the formula than rounding explains, as in the test "computed" of `audit`.
    Beyond `PAIRS` pairs, evenly spaced rows are compared. An edit's factor of a row is divided out.
    """

    name = "an output of another formula"

    def find(self, case: Case) -> Findings:
        value, output = case.inputs.get("value"), case.output
        if value is None or output is None:
            return
        rows = slice(0, case.shape[2], max(1, math.ceil(math.prod(case.shape) / PAIRS)))
        output = output[:, :, rows]
        if case.factor is not None:
            output = output / case.factor[..., rows, None].to(output.dtype)  # rows of factor 0 see no key
        found = measure_deviation(cut(case.problem, Region(queries=rows)), value, output, ~case.real[..., rows])
        finite = all(bool(tensor.isfinite().all()) for tensor in case.inputs.values())
        not_finite = found.ratio == math.inf and (not finite or case.broken)  # other checks find where NaN comes from
        if found.is_rounding or not_finite:
            return
        sequence, head, query = found.row
        yield self.finding(
            "error",
            f"The output is {found.ratio:.2g} times its rounding away from softmax(scores) · value of the call's own "
            f"inputs and mask; {found.limit:g} is what rounding explains.",
            "Use another backend, or look for the code that changes the output. ch.audit names the formula that it is.",
            sequence=sequence,
            head=head,
            query=range(case.shape[2])[rows][query],
        )
