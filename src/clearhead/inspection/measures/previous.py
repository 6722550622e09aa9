"""The weight on the previous token."""

from __future__ import annotations

from clearhead.inspection.measures.base import Found, Measure, Subject, on_keys


class Previous(Measure):
    """The weight on the token before the query."""

    says = "The weight on the token before the query's own, a mean over the queries that may see one."
    formula = "mean_i w_ij, j the last key before i that is no padding"
    source = "Clark et al. 2019, What Does BERT Look At?"
    does = "attends to the previous token"
    needs = ("placed",)

    def of(self, subject: Subject) -> Found:
        return on_keys(subject, self.name, lambda: subject.at(subject.before, subject.places))
