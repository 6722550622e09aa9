"""The weight on the next token."""

from __future__ import annotations

from torch import Tensor

from clearhead.inspection.measures.base import OnKeys, Subject


class Next(OnKeys):
    says = "The weight on the token after the query's own, a mean over the queries that may see one."
    formula = "mean_i w_ij, j the first key after i that is no padding"
    does = "attends to the next token"

    def keys(self, subject: Subject) -> Tensor:
        return subject.at(subject.after, subject.places + 1)
