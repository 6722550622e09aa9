"""How spread each query's weights are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.inspection.reductions.base import Look, Reduction, per_query
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Found, Summary


@dataclass(frozen=True)
class Entropy(Reduction):
    """The entropy of each query's weights, in nats: 0 for one key, log(n) for n equal ones.

    >>> import torch, clearhead as ch
    >>> ch.weights(torch.zeros(2, 4), torch.zeros(3, 4)).entropy()
    tensor([1.0986, 1.0986])

    Formula: H_i = −Σ_j w_ij log w_ij = log Σ_j exp(s_ij) − Σ_j w_ij s_ij. Gives (..., Lq); 0 where nothing is allowed.
    With sinks it is still the first of these, over the keys alone. Cost: one pass over the allowed pairs, O(Lq) memory.
    Source: Shannon 1948, "A Mathematical Theory of Communication".
    """

    along = "queries"

    def begin(self, problem: Problem) -> Tensor:
        return per_query(problem)

    def look(self, buffers: Tensor, look: Look) -> None:
        expected = torch.einsum("bhqk,bhqk->bhq", look.weights, look.finite_scores)
        log_sum = look.log_sum if look.mass is None else look.log_sum * look.mass
        entropy = (log_sum - expected).clamp_(min=0.0)
        buffers[look.at] = entropy.masked_fill_(look.blind, 0.0).abs_()

    def summary(self, problem: Problem) -> Summary:
        return Summary(entropy=True)

    def found(self, found: Found, problem: Problem) -> Tensor | None:
        return found.entropy
