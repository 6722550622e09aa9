"""The length of the vectors that a head moves."""

from __future__ import annotations

from clearhead.inspection.measures.base import Found, Measure, Subject, averaged


class ValueMass(Measure):
    says = (
        "How much the head moves: the length of the values by their weights. With sinks the weights are the model's "
        "own, which sum to less than 1."
    )
    formula = "mean_i Σ_j w_ij ‖v_j‖"
    range = "0 to the length of the longest value"
    source = "Kobayashi et al. 2020, Attention is Not Only a Weight: Analyzing Transformers with Vector Norms"
    needs = ("value",)

    def of(self, subject: Subject) -> Found:
        return averaged(subject.moved, subject.uniform.moved, subject.counted)
