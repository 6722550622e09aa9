"""The weight on the first token."""

from __future__ import annotations

from clearhead.inspection.measures.base import Found, Measure, Subject, on_keys


class First(Measure):
    """The weight on the first key."""

    says = (
        "The weight on the first key of the sequence, a mean over the queries that may see it: in a sliding window the "
        "first few alone."
    )
    formula = "mean_i w_ij, j the first key that is no padding"
    source = "Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks"
    does = "attends to the first token"

    def of(self, subject: Subject) -> Found:
        return on_keys(subject, self.name, lambda: subject.after[:, :1].expand(-1, subject.uniform.sizes.queries))
