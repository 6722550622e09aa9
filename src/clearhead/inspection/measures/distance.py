"""The mean distance to the keys."""

from __future__ import annotations

from clearhead.inspection.measures.base import Found, Measure, Subject, averaged


class Distance(Measure):
    says = "How far the head looks: the mean distance to the keys by their weights, in positions."
    formula = "mean_i Σ_j w_ij |i − j|"
    range = "0 to the length of the sequence"
    source = "Vig and Belinkov 2019, Analyzing the Structure of Attention in a Transformer Language Model"
    needs = ("placed",)

    def of(self, subject: Subject) -> Found:
        return averaged(subject.own.distance, subject.uniform.distance, subject.counted)
