"""The weight on the previous token."""

from __future__ import annotations

from torch import Tensor

from clearhead.inspection.measures.base import OnKeys, Subject


class Previous(OnKeys):
    says = "The weight on the token before the query's own, a mean over the queries that may see one."
    formula = "mean_i w_ij, j the last key before i that is no padding"
    does = "attends to the previous token"

    def keys(self, subject: Subject) -> Tensor:
        return subject.at(subject.before, subject.places)
