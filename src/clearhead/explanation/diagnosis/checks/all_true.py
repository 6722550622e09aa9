"""A mask that removes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from clearhead.explanation.diagnosis.case import Case, Check
from clearhead.explanation.diagnosis.diagnosis import Finding


class AllTrue(Check):
    """A mask allows every query every key. The check is exact.

    It is a note: a batch without padding has such a mask. One query that stands at the last key is left out.
    """

    name = "a mask that is all true"
    looks_for = "masks that do nothing"

    def find(self, case: Case) -> Iterator[Finding]:
        queries, keys = case.shape[2:]
        given = case.problem.visible is not None or any(not t.any() for t in (case.added[n] for n in case.as_mask))
        one = queries == 1 and (case.mask is None or case.mask.positional)
        if not given or one or keys == 1 or not bool((case.rows.visible == keys).all()):
            return
        if any(bool(case.added[name].any()) for name in case.as_mask):  # it adds something
            return
        what = "the mask" if case.mask is None else case.mask.title()
        yield self.finding(
            case,
            "note",
            f"Under {what} each of {queries} queries may see all {keys} keys: it does nothing.",
            "Leave the mask out if it never hides a key; else check the lengths, or the window.",
        )
