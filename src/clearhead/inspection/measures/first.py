"""The weight on the first token."""

from __future__ import annotations

from torch import Tensor

from clearhead.inspection.measures.base import OnKeys, Subject


class First(OnKeys):
    says = (
        "The weight on the first key of the sequence, a mean over the queries that may see it: in a sliding window the "
        "first few alone."
    )
    formula = "mean_i w_ij, j the first key that is no padding"
    source = "Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks"
    does = "attends to the first token"
    needs = ()

    def keys(self, subject: Subject) -> Tensor:
        return subject.after[:, :1].expand(-1, subject.uniform.sizes.queries)
