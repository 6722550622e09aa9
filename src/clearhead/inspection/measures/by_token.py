"""The weight on keys whose token, or the token before them, is the query's."""

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


class Induction(OnPairs):
    says = (
        "The weight on the keys right after earlier occurrences of the query's token, before the query, a mean over "
        "the queries that may see one."
    )
    formula = "mean_i Σ_j w_ij [token_(j−1) = token_i, j < i], j − 1 the last key before j that is no padding"
    source = "Olsson et al. 2022, In-context Learning and Induction Heads (prefix matching)"
    does = "attends to what followed the same word before (induction)"
    needs = ("tokens", "placed")

    def pairs(self, subject: Subject, asked: Tensor, held: Tensor) -> Pairs:
        before = subject.before[:, :-1]
        earlier = subject.at(held, before)  # the token of the word before each key
        earlier = earlier.masked_fill(before < 0, -1)
        if subject.keys is not None:
            earlier = earlier.masked_fill(~subject.keys, -1)
        return Pairs(asked, earlier, subject.earlier)
