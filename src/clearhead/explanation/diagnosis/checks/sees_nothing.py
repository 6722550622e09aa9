"""Queries to which the mask allows no key."""

from __future__ import annotations

from collections.abc import Iterator

from clearhead.explanation.diagnosis.case import Case, Check, first_place
from clearhead.explanation.diagnosis.diagnosis import Finding


class SeesNothing(Check):
    """Queries may see no key at all. The check is exact, so there is no threshold.

    It is a note where no query sees the keys of these queries either: they are likely padding, and their output is not
    used. It is an error where no query of the call sees a key, and a warning else.
    """

    name = "queries that see nothing"
    looks_for = "queries that see nothing"

    def find(self, case: Case) -> Iterator[Finding]:
        if case.problem.spans is None:
            return
        batch, heads, queries, keys = case.shape
        blind = ~case.seen[1] & case.real
        count, total = int(blind.sum()), blind.numel()
        if not count:
            return
        shape = f"({batch}, {heads}, {queries}, {keys})"
        if count == int(case.real.sum()):
            yield self.finding(
                case,
                "error",
                f"All {count} queries of {shape} may see no key: their output is 0.",
                "Pass a mask that is True where a query may attend; torch.nn's modules mean the opposite by True, for "
                "them pass ~mask.",
                **first_place(blind),
            )
            return
        evidence = f"{count} of {total} queries of {shape} may see no key: their output is 0."
        if case.only_padding(blind):
            yield self.finding(
                case,
                "note",
                f"{evidence} No query sees their keys either, as with padding.",
                "Nothing, if these positions are padding. Other backends give NaN, or the mean of all values, there.",
                **first_place(blind),
            )
        else:
            yield self.finding(
                case,
                "warning",
                evidence,
                "Let each query see one key at least, such as its own, or leave these queries out. Where this is "
                "padding: other backends give NaN, or the mean of all values, there.",
                **first_place(blind),
            )
