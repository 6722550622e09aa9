"""How far a head's weights are spread over the keys, and what share of them goes to one key."""

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
