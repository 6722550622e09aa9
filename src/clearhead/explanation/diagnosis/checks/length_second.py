"""Inputs (B, L, H, D), which are read as (B, H, L, D)."""

from __future__ import annotations

from collections.abc import Iterator

from clearhead.explanation.diagnosis.case import Case, Check
from clearhead.explanation.diagnosis.diagnosis import Finding

MANY = 128  # more heads than models have
TIMES = 4


class LengthSecond(Check):
    """Query and key (B, L, H, D) that were passed without `layout="BLHD"`.

    Shapes alone tell: both have more than 128 heads, and 4 times as many heads as positions. It is a note, since a
    model may have so many heads.
    """

    name = "length and heads exchanged"
    looks_for = "length and heads exchanged, (B, L, H, D), where there are far more heads than positions"

    def find(self, case: Case) -> Iterator[Finding]:
        query, key = case.inputs.get("query"), case.inputs.get("key")
        if query is None or key is None or query.shape[1:3] != key.shape[1:3]:
            return
        heads, length = query.shape[1:3]
        if heads > MANY and heads >= TIMES * length:
            yield self.finding(
                case,
                "note",
                f"query has shape {tuple(query.shape)}, which is read as (B, H, L, D): {heads} heads of {length} "
                "positions. Whether this was meant, shapes don't say.",
                f"If these are {heads} positions of {length} heads, (B, L, H, D), pass layout='BLHD', or "
                "query.transpose(1, 2) and key and value alike.",
                input="query",
            )
