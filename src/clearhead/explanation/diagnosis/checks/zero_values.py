"""Heads whose values, or output, are 0."""

from __future__ import annotations

from collections.abc import Iterator

from clearhead.explanation.diagnosis.case import Case, Check, used
from clearhead.explanation.diagnosis.diagnosis import Finding


class ZeroValues(Check):
    """A head's value is 0 at every key that some query sees, so its output is 0. The check is exact.

    It is a note: DETR's first layer begins from queries of 0, and a head may have been pruned this way.
    """

    name = "values of 0"
    looks_for = "heads whose values are all 0"

    def find(self, case: Case) -> Iterator[Finding]:
        value = case.inputs.get("value")
        if value is None or not value.shape[-1]:
            return
        counted = used(case, "value", value)
        if not bool(counted.any()):
            return
        nothing = (value == 0).all(-1) | ~counted
        seen, empty = (part.transpose(0, 1).flatten(1) for part in (counted, nothing))
        of_keys = empty.all(1) & seen.any(1)
        heads = of_keys.repeat_interleave(case.shape[1] // len(of_keys)).nonzero().flatten().tolist()
        if heads:
            yield self.finding(
                case,
                "note",
                f"The values of {len(heads)} of {case.shape[1]} heads are 0 at every key that is seen, value "
                f"{tuple(value.shape)}: their output is 0.",
                "See what makes the values, where it is not meant: a projection of 0, or a cache that is not filled.",
                heads=heads,
            )
