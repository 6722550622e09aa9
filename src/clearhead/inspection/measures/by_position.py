"""The weight on a key at a place that the query's own place gives, and the mean distance to the keys."""

from __future__ import annotations

from torch import Tensor

from clearhead.inspection.measures.base import Found, Measure, OnKeys, Subject, averaged


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


class Distance(Measure):
    says = "How far the head looks: the mean distance to the keys by their weights, in positions."
    formula = "mean_i Σ_j w_ij |i − j|"
    range = "0 to the length of the sequence"
    source = "Vig and Belinkov 2019, Analyzing the Structure of Attention in a Transformer Language Model"
    needs = ("placed",)

    def of(self, subject: Subject) -> Found:
        return averaged(subject.own.find("distance"), subject.uniform.find("distance"), subject.counted)
