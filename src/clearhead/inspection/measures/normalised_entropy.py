"""The spread of a head's weights."""

from __future__ import annotations

import torch

from clearhead.inspection.measures.base import Found, Measure, Subject, averaged


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
        share = subject.own.entropy / most.masked_fill(~choosing, 1.0)
        return averaged(share, torch.ones_like(most), choosing, least=True)
