"""Softmaxes over hardly more than one key."""

from __future__ import annotations

from collections.abc import Iterator

from clearhead.explanation.diagnosis.base import Check
from clearhead.explanation.diagnosis.case import Case, by_head
from clearhead.explanation.diagnosis.finding import Finding

FEW = 1.1
CHOICE = 8  # keys that a query may see: of fewer a small number is no finding
LEAST = 8  # queries a head


class FewKeys(Check):
    """The effective number of keys, exp of the mean entropy over the queries that may see 8 keys or more, is ≤ 1.1.

    1.1 is two keys of weights 0.98 and 0.02. Queries of fewer keys are left out, those of one have 1 by construction.
    Some heads of trained models are like that: a note; where all heads of a call are, it is a warning.
    """

    name = "few effective keys"
    looks_for = "softmaxes over hardly more than one key"

    def find(self, case: Case) -> Iterator[Finding]:
        rows = case.rows
        counted = rows.counted & (rows.visible >= CHOICE)
        enough = counted.sum((0, 2)) >= LEAST
        effective = by_head(rows.entropy, counted).exp()
        heads = (enough & (effective <= FEW)).nonzero().flatten().tolist()
        if not heads:
            return
        every = len(heads) == int(enough.sum())
        visible = float(by_head(rows.visible, counted)[heads].mean())
        yield self.finding(
            case,
            "warning" if every else "note",
            f"{len(heads)} of {case.shape[1]} heads attend to {float(effective[heads].min()):.3g} effective keys of "
            f"{visible:.3g} that a query may see on average.",
            "Where it is not meant, scale the scores down or normalise queries and keys. `weights(...).topk(1)` gives "
            "the keys.",
            heads=heads,
        )
