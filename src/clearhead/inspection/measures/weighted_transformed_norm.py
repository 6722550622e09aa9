"""The length of what a head writes for its keys."""

from __future__ import annotations

from clearhead.inspection.measures.base import Found, Measure, Subject, averaged


class WeightedTransformedNorm(Measure):
    says = (
        "How much the head writes: the length of the transformed values v W_O by their weights, W_O of the layer that "
        "writes the heads. With sinks the weights are the model's own, which sum to less than 1."
    )
    formula = "mean_i Σ_j w_ij ‖v_j W_O‖"
    range = "0 to the length of the longest transformed value"
    source = "Kobayashi et al. 2020, Attention is Not Only a Weight: Analyzing Transformers with Vector Norms"
    needs = ("transformed",)

    def of(self, subject: Subject) -> Found:
        return averaged(subject.moved("transformed"), subject.uniform.moved("transformed"), subject.counted)
