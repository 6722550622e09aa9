"""The weight on the query's own token, as a measure."""

from __future__ import annotations

from clearhead.inspection.measures.base import Found, Measure, Subject, on_keys


class Itself(Measure):
    """The weight on the query's own token."""

    says = "The weight on the query's own token, a mean over the queries that may see it."
    formula = "mean_i w_ii"
    source = "Clark et al. 2019, What Does BERT Look At?"
    does = "attends to the token itself"
    needs = ("placed",)

    def of(self, subject: Subject) -> Found:
        places = subject.places
        return on_keys(
            subject, self.name, lambda: places.masked_fill((places < 0) | (places >= subject.uniform.sizes.keys), -1)
        )
