"""Softmaxes that choose nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from clearhead.explanation.diagnosis.case import Case, Check, by_head
from clearhead.explanation.diagnosis.diagnosis import Finding

NEAR = 0.999
LEAST = 8  # queries a head


class Uniform(Check):
    """The entropy divided by log n is 0.999 or more on average, where the mask allows the query n keys.

    It is always a note: a freshly initialised model has 0.9999 in every head. In a trained model such a head takes the
    mean of the values.
    """

    name = "uniform heads"
    looks_for = "uniform weights"

    def find(self, case: Case) -> Iterator[Finding]:
        rows = case.rows
        choosing = rows.choosing
        enough = choosing.sum((0, 2)) >= LEAST
        limit = rows.visible.clamp_min(2).log().to(rows.entropy)
        normalised = by_head(torch.where(choosing, rows.entropy, 0.0) / limit, choosing)
        heads = (enough & (normalised >= NEAR)).nonzero().flatten().tolist()
        if heads:
            yield self.finding(
                case,
                "note",
                f"In {len(heads)} of {case.shape[1]} heads the weights are uniform over the keys that the mask allows: "
                f"their entropy is {float(normalised[heads].mean()):.5f} of the largest possible.",
                "Nothing in a freshly initialised model. In a trained one these heads take the mean of the values.",
                heads=heads,
            )
