"""The weight on some keys of each query: at a place that the query's own place gives, or with its token."""

from __future__ import annotations

from torch import Tensor

from clearhead.inspection.measures.base import Measure, OnKeys, OnPairs, Pairs, Subject


class Previous(OnKeys):
    says = "The weight on the token before the query's own, a mean over the queries that may see one."
    formula = "mean_i w_ij, j the last key before i that is no padding"
    does = "attends to the previous token"

    def keys(self, subject: Subject) -> Tensor:
        return subject.at(subject.before, subject.places)


class Next(OnKeys):
    says = "The weight on the token after the query's own, a mean over the queries that may see one."
    formula = "mean_i w_ij, j the first key after i that is no padding"
    does = "attends to the next token"

    def keys(self, subject: Subject) -> Tensor:
        return subject.at(subject.after, subject.places + 1)


class Itself(OnKeys):
    says = "The weight on the query's own token, a mean over the queries that may see it."
    formula = "mean_i w_ii"
    does = "attends to the token itself"

    def keys(self, subject: Subject) -> Tensor:
        places = subject.places
        return places.masked_fill((places < 0) | (places >= subject.uniform.sizes.keys), -1)


class First(OnKeys):
    says = (
        "The weight on the first key of the sequence, a mean over the queries that may see it: in a sliding window the "
        "first few alone."
    )
    formula = "mean_i w_ij, j the first key that is no padding"
    source = "Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks"
    does = "attends to the first token"
    needs = ()

    def keys(self, subject: Subject) -> Tensor:
        return subject.after[:, :1].expand(-1, subject.uniform.sizes.queries)


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


ON_SOME_KEYS: tuple[Measure, ...] = (Previous(), Next(), Itself(), First(), SameWord(), Induction())
