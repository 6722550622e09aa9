"""The weight on the next token."""

from __future__ import annotations

from clearhead.inspection.measures.base import Found, Measure, Subject, on_keys


class Next(Measure):
    """The weight on the token after the query."""

    says = "The weight on the token after the query's own, a mean over the queries that may see one."
    formula = "mean_i w_ij, j the first key after i that is no padding"
    source = "Clark et al. 2019, What Does BERT Look At?"
    does = "attends to the next token"
    needs = ("placed",)

    def of(self, subject: Subject) -> Found:
        return on_keys(subject, self.name, lambda: subject.at(subject.after, subject.places + 1))
