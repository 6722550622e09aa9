"""How much goes to other places of the same token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from clearhead.inspection.measures.base import Found, Measure, of_region, on_pairs
from clearhead.inspection.reductions.base import arange
from clearhead.problem.region import Region

if TYPE_CHECKING:
    from clearhead.inspection.measures.subject import Subject


class SameWord(Measure):
    """The weight on other places of the query's token."""

    name = "same word"
    says = "The weight on other places where the query's token stands, a mean over the queries that may see one."
    formula = "mean_i Σ_j w_ij [token_j = token_i, j ≠ i]; of cross attention also j = i"
    range = "0 to 1"
    source = "Wang et al. 2023, Interpretability in the Wild (duplicate token heads)"
    does = "attends to the same word elsewhere"

    def applies(self, subject: Subject) -> bool:
        return subject.tokens is not None

    def of(self, subject: Subject) -> Found:
        assert subject.tokens is not None
        asked, held = subject.tokens
        places = subject.places if subject.placed else None

        def rule(region: Region) -> Tensor:
            rows, columns = region.queries, arange(held.shape[-1], held.device)[region.keys]
            same = of_region(asked, region)[:, rows, None] == of_region(held, region)[:, None, region.keys]
            if places is not None:
                same = same & (of_region(places, region)[:, rows, None] != columns)
            return same.unsqueeze(1)

        return on_pairs(subject, rule)
