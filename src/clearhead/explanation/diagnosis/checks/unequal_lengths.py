"""Positions where queries and keys are not equally many."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from clearhead.explanation.diagnosis.case import Case, Check
from clearhead.explanation.diagnosis.diagnosis import Finding


class UnequalLengths(Check):
    """A mask or bias that depends on positions, with Lq ≠ Lk.

    It is an error where no alignment says where query 0 stands. It is a warning where query 0 stands at key 0 and there
    are more keys than queries: no query sees the last keys, and these are the newest of a cache. The check is exact.
    """

    name = "positions of unequal lengths"
    looks_for = "causal masks of unequal lengths"

    def find(self, case: Case) -> Iterator[Finding]:
        sizes = case.problem.sizes
        _, _, queries, keys = case.shape
        if case.unaligned:
            yield self.finding(
                case,
                "error",
                f"The mask or bias depends on positions, there are {queries} queries and {keys} keys, and no align= "
                "says where query 0 stands. The other findings are for "
                f"{'lower_right' if queries < keys else 'upper_left'}.",
                'Pass align="lower_right" (the last query stands at the last key, as with a cache), "upper_left" '
                "(query 0 stands at key 0), or the position of query 0.",
            )
            return
        at_first = sizes.align == "upper_left" or (isinstance(sizes.align, int) and sizes.align == 0)
        if isinstance(sizes.align, Tensor) or not at_first or queries >= keys or case.problem.spans is None:
            return
        positional = case.mask is None or (case.mask.positional and case.mask._document_edges is None)
        hidden = ~case.seen[0][..., queries:]
        if positional and bool(hidden.all()):
            yield self.finding(
                case,
                "warning",
                f"{queries} queries are aligned at the upper left of {keys} keys: no query sees the last "
                f"{keys - queries} keys, and the last query stands at key {queries - 1}.",
                'Where these keys are a cache\'s, pass align="lower_right"; to F.scaled_dot_product_attention, whose '
                "is_causal=True is aligned at the upper left, pass the mask.",
            )
