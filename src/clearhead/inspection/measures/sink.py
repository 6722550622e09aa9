"""The weight on the key that receives most."""

from __future__ import annotations

from functools import partial

import torch

from clearhead.inspection.measures.base import Found, Measure, Peak, Subject


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
        received = subject.own.received.cpu().double()
        uniform = subject.uniform.received.cpu().double().expand_as(received)
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
