"""How much goes to the query's own token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clearhead.inspection.measures.base import Found, Measure, on_keys

if TYPE_CHECKING:
    from clearhead.inspection.measures.subject import Subject


class Itself(Measure):
    """The weight on the query's own token."""

    name = "itself"
    says = "The weight on the query's own token, a mean over the queries that may see it."
    formula = "mean_i w_ii"
    range = "0 to 1"
    source = "Clark et al. 2019, What Does BERT Look At?"
    does = "attends to the token itself"

    def applies(self, subject: Subject) -> bool:
        return subject.placed

    def of(self, subject: Subject) -> Found:
        places = subject.places
        return on_keys(
            subject, self.name, lambda: places.masked_fill((places < 0) | (places >= subject.uniform.sizes.keys), -1)
        )
