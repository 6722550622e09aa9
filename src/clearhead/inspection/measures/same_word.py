"""The weight on the same token elsewhere."""

from __future__ import annotations

from clearhead.inspection.measures.base import Found, Measure, Pairs, Subject, on_pairs


class SameWord(Measure):
    """The weight on other places of the query's token."""

    says = "The weight on other places where the query's token stands, a mean over the queries that may see one."
    formula = "mean_i Σ_j w_ij [token_j = token_i, j ≠ i]; of cross attention also j = i"
    source = "Wang et al. 2023, Interpretability in the Wild (duplicate token heads)"
    does = "attends to the same word elsewhere"
    needs = ("tokens",)

    def of(self, subject: Subject) -> Found:
        assert subject.tokens is not None
        return on_pairs(subject, Pairs(*subject.tokens, subject.elsewhere if subject.placed else None))
