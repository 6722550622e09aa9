"""Softmaxes that are one weight of 1."""

from __future__ import annotations

from collections.abc import Iterator

from clearhead.explanation.diagnosis.case import Case, Check, by_head
from clearhead.explanation.diagnosis.diagnosis import Finding

LARGE = 0.99
NEARLY_ALL = 0.9
LEAST = 8  # queries a head: fewer may be so by chance


class Saturation(Check):
    """The largest weight is at least 0.99 for 90% of the queries that have keys to choose from.

    The gradient of a score is at most w (1 − w) times the gradient of its weight, 0.01 times here: such a softmax
    hardly learns. It is a note, since trained models have some heads that copy one token, and a warning where all heads
    of a call are like this. Source: Zhai et al. 2023.
    """

    name = "saturation"
    looks_for = f"largest weights above {LARGE}"

    def find(self, case: Case) -> Iterator[Finding]:
        rows = case.rows
        choosing = rows.choosing
        enough = choosing.sum((0, 2)) >= LEAST
        share = by_head((rows.largest_weight >= LARGE), choosing)
        heads = (enough & (share >= NEARLY_ALL)).nonzero().flatten().tolist()
        if not heads:
            return
        every = len(heads) == int(enough.sum())
        largest = float(rows.largest_score[choosing].max())
        yield self.finding(
            case,
            "warning" if every else "note",
            f"In {len(heads)} of {case.shape[1]} heads the largest weight is {LARGE} or more for "
            f"{float(share[heads].mean()):.0%} of the queries; the largest score is {largest:.3g}.",
            "Where it is not meant: scale the scores down, normalise queries and keys, or cap the scores "
            "(Dot(softcap=50.0)). Gradients through these weights are near 0.",
            heads=heads,
        )
