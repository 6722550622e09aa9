"""Heads whose values, or output, are 0."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from clearhead.explanation.diagnosis.base import Check
from clearhead.explanation.diagnosis.case import Case
from clearhead.explanation.diagnosis.finding import Finding
from clearhead.problem.unseen import group, seen


class ZeroValues(Check):
    """A head whose value is 0 at every key that some query sees: its output is 0, whatever its weights; exact."""

    name = "values of 0"
    looks_for = "heads whose values are all 0"

    def find(self, case: Case) -> Iterator[Finding]:
        value = case.inputs.get("value")
        if value is None or not value.shape[-1]:
            return
        nothing = (value == 0).all(-1)
        if case.problem.spans is not None:
            keys, _ = seen(case.problem.spans, case.problem.sizes)
            keys = group(keys, value.shape[1]) if value.shape[1] > 1 else keys.any(1, keepdim=True)
            if not bool(keys.any()):
                return
            nothing = nothing | ~keys
        of_keys = torch.cat([part.all().reshape(1) for part in nothing.unbind(1)])
        heads = of_keys.repeat_interleave(case.shape[1] // len(of_keys)).nonzero().flatten().tolist()
        if heads:
            yield self.finding(
                case,
                "warning",
                f"The values of {len(heads)} of {case.shape[1]} heads are 0 at every key that is seen, value "
                f"{tuple(value.shape)}: their output is 0.",
                "See what makes the values: a projection that is all 0, or a cache that nothing was written to.",
                heads=heads,
            )
