"""The formula and the code of a score as a page holds it: terms of features, added up."""

from __future__ import annotations

from torch import Tensor

from clearhead.base.steps import Step
from clearhead.scores.base import SCORES, Score

# The term of a feature: as a formula, and as code over all pairs.
TERMS = {
    "mul": ("query[i, d] · key[j, d]", "query.unsqueeze(-2) * key.unsqueeze(-3)"),
    "tanh_add": ("tanh(query[i, d] + key[j, d])", "torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3))"),
    "sq_diff": ("(query[i, d] - key[j, d])²", "(query.unsqueeze(-2) - key.unsqueeze(-3)).square()"),
}


class ScoreOfTerms(Score):
    """A score as a page holds it: a sum over features of a φ of the query's and the key's, each times a weight."""

    def __init__(self, phi: str, weighted: bool) -> None:
        super().__init__()
        self.phi, self.weighted = phi, weighted

    def tile(self, query: Tensor, key: Tensor) -> Tensor:
        return query.new_zeros(*query.shape[:-1], key.shape[-2])  # the page has the numbers

    def steps(self, query: Tensor, key: Tensor) -> list[Step]:
        pair, code = TERMS[self.phi]
        times, given = "", []
        if self.weighted:
            times, code = "weight[d] · ", f"({code}) * weight"
            given.append(Step("weight", "", "The factor of each feature.", query[0, 0, 0], ("E",)))
        formula = f"scores[i, j] = Σ_d {times}{pair}"
        return [*given, Step("scores", formula, "", self.tile(query, key), SCORES, f"scores = ({code}).sum(-1)")]
