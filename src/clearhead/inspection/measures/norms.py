"""The lengths of the values that a head weighs, and of what it writes for them."""

from __future__ import annotations

from clearhead.inspection.measures.base import Found, Measure, Subject, averaged


class WeightedValueNorm(Measure):
    says = (
        "The length of the values by their weights, before the layer that writes the heads. With sinks the weights are "
        "the model's own, which sum to less than 1."
    )
    formula = "mean_i Σ_j w_ij ‖v_j‖"
    range = "0 to the length of the longest value"
    source = "Kobayashi et al. 2020, Attention is Not Only a Weight, whose norm is the weighted transformed norm"
    needs = ("value",)

    def of(self, subject: Subject) -> Found:
        return averaged(subject.moved("value"), subject.uniform.moved("value"), subject.counted)


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
