"""The weight on the same token elsewhere."""

from __future__ import annotations

from torch import Tensor

from clearhead.inspection.measures.base import OnPairs, Pairs, Subject


class SameWord(OnPairs):
    says = "The weight on other places where the query's token stands, a mean over the queries that may see one."
    formula = "mean_i Σ_j w_ij [token_j = token_i, j ≠ i]; of cross attention also j = i"
    source = "Wang et al. 2023, Interpretability in the Wild (duplicate token heads)"
    does = "attends to the same word elsewhere"

    def pairs(self, subject: Subject, asked: Tensor, held: Tensor) -> Pairs:
        return Pairs(asked, held, subject.elsewhere if subject.placed else None)
