"""How a head spreads its weights over all keys, how far these lie, and how long the values are that it weighs."""

from __future__ import annotations

from functools import partial

import torch

from clearhead.inspection.measures.base import Found, Measure, Peak, Subject, averaged


class NormalisedEntropy(Measure):
    says = (
        "How spread the weights are: their entropy as a part of the largest possible, a mean over the queries that may "
        "see several keys."
    )
    formula = "mean_i −Σ_j w_ij log w_ij / log n_i, n_i the number of keys that query i may see"
    least = True
    range = "0, all on one key, to 1, uniform"
    source = "Shannon 1948, A Mathematical Theory of Communication"

    def of(self, subject: Subject) -> Found:
        most = subject.uniform.log_sum_exp
        choosing = subject.counted & (most > 0.5)  # log 2 = 0.69
        share = subject.own.find("entropy") / most.masked_fill(~choosing, 1.0)
        return averaged(share, torch.ones_like(most), choosing, least=True)


class Sink(Measure):
    says = (
        "The share of all weight that goes to one key, the sink: the key that receives most beyond what uniform "
        "attention under the same mask would give it."
    )
    formula = "r_j / N, j = argmax_j (r_j − u_j), r_j = Σ_i w_ij, u_j that of uniform attention, N the queries"
    range = "0 to 1; the excess over uniform is never below 0"
    source = "Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks"
    does = "gives one key much of its weight"

    def of(self, subject: Subject) -> Found:
        received = subject.own.find("received").cpu().double()
        uniform = subject.uniform.find("received").cpu().double().expand_as(received)
        excess = received - uniform
        if subject.keys is not None:
            excess = excess.masked_fill(~subject.keys.cpu().unsqueeze(1), -torch.inf)
        key = excess.argmax(-1, keepdim=True)  # of each sequence and head
        each = subject.counted.cpu().sum(-1).expand(received.shape[:2]).double()
        count = each.sum(0)
        own, even = (t.gather(-1, key).squeeze(-1) for t in (received, uniform))
        key = key.squeeze(-1)
        peak = partial(Peak, own / each, even / each, torch.full_like(key, -1))
        return Found(own.sum(0) / count, even.sum(0) / count, count, key, peak, lambda: (own, each))


class Distance(Measure):
    says = "How far the head looks: the mean distance to the keys by their weights, in positions."
    formula = "mean_i Σ_j w_ij |i − j|"
    range = "0 to the length of the sequence"
    source = "Vig and Belinkov 2019, Analyzing the Structure of Attention in a Transformer Language Model"
    needs = ("placed",)

    def of(self, subject: Subject) -> Found:
        return averaged(subject.own.find("distance"), subject.uniform.find("distance"), subject.counted)


class WeightedValueNorm(Measure):
    says = (
        "The length of the values by their weights, before the layer that writes the heads. With sinks the weights are "
        "the model's own, which sum to less than 1."
    )
    formula = "mean_i Σ_j w_ij ‖v_j‖"
    range = "0 to the length of the longest value"
    source = "Kobayashi et al. 2020, Attention is Not Only a Weight, whose norm is the weighted transformed norm"
    needs = ("value",)

    def of(self, subject: Subject) -> Found:
        return averaged(subject.moved("value"), subject.uniform.moved("value"), subject.counted)


class WeightedTransformedNorm(Measure):
    says = (
        "How much the head writes: the length of the transformed values v W_O by their weights, W_O of the layer that "
        "writes the heads. With sinks the weights are the model's own, which sum to less than 1."
    )
    formula = "mean_i Σ_j w_ij ‖v_j W_O‖"
    range = "0 to the length of the longest transformed value"
    source = "Kobayashi et al. 2020, Attention is Not Only a Weight: Analyzing Transformers with Vector Norms"
    needs = ("transformed",)

    def of(self, subject: Subject) -> Found:
        return averaged(subject.moved("transformed"), subject.uniform.moved("transformed"), subject.counted)


_NORMS = WeightedValueNorm(), WeightedTransformedNorm()
OF_ALL_KEYS: tuple[Measure, ...] = (NormalisedEntropy(), Sink(), Distance(), *_NORMS)
