"""Softmaxes over hardly more than one key."""

from __future__ import annotations

from collections.abc import Iterator

from clearhead.explanation.diagnosis.case import Case, Check, by_head
from clearhead.explanation.diagnosis.diagnosis import Finding

FEW = 1.1
CHOICE = 8  # the fewest keys that a counted query may see: among fewer, a small effective number means little
LEAST = 8  # queries a head


class FewKeys(Check):
    """The effective number of keys, exp of the mean entropy over the queries that may see 8 keys or more, is ≤ 1.1.

    1.1 is the effective number of two keys with weights 0.98 and 0.02. Queries that may see fewer keys are left out: a
    query of one key always has 1. It is a note, since trained models have some heads like this, and a warning where all
    heads of a call are like this.
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
