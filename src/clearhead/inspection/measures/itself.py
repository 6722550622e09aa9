"""The weight on the query's own token, as a measure."""

from __future__ import annotations

from torch import Tensor

from clearhead.inspection.measures.base import OnKeys, Subject


class Itself(OnKeys):
    says = "The weight on the query's own token, a mean over the queries that may see it."
    formula = "mean_i w_ii"
    does = "attends to the token itself"

    def keys(self, subject: Subject) -> Tensor:
        places = subject.places
        return places.masked_fill((places < 0) | (places >= subject.uniform.sizes.keys), -1)
