"""The score of a page as an explanation shows it: a sum of terms of features."""

from __future__ import annotations

from torch import Tensor

from clearhead.base.symbolic.steps import Step, made
from clearhead.scores.base import Score
from clearhead.scores.pair_functions import PHIS, Phi


class ScoreOfTerms(Score):
    """A score as a page holds it: the sum over features of φ(query feature, key feature), each times a weight."""

    def __init__(self, phi: Phi, weighted: bool) -> None:
        super().__init__()
        self.phi, self.weighted = PHIS[phi], weighted

    def tile(self, query: Tensor, key: Tensor) -> Tensor:
        return query.new_zeros(*query.shape[:-1], key.shape[-2])  # the page has the numbers

    def steps(self, query: Step, key: Step) -> list[Step]:
        rows, columns = query.unsqueeze(-2), key.unsqueeze(-3)
        term = self.phi.value(self.phi.combine(rows, columns))
        weight = Step("weight", "The factor of each feature.", query.value[0, 0, 0], ("E",))
        summed = (weight * term if self.weighted else term).sum(-1)
        scores = made("scores", "", summed, value=self.tile(query.value, key.value))
        return [weight, scores] if self.weighted else [scores]
