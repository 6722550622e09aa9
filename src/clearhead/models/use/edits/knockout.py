"""An edit that cuts some pairs."""

from __future__ import annotations

import numpy as np

from clearhead.base.numbers import check_flag
from clearhead.models.tap.choice import Heads, Layers, Positions, checked_positions, chosen
from clearhead.models.use.edits.base import Edit
from clearhead.models.use.edits.spot import Spot, without_keys
from clearhead.problem.problem import Problem


class Knockout(Edit):
    """Takes away the weights of some queries on some keys.

    >>> import torch, clearhead as ch
    >>> block, x = ch.nn.DotProductAttention(), torch.rand(1, 4, 10, 8)
    >>> with ch.edit(block, ch.edits.Knockout(heads=2, queries=9, keys=[0, 1])):
    ...     output = block(x, x, x, mask=ch.Causal())
    >>> changed = (output != block(x, x, x, mask=ch.Causal())).any(-1)
    >>> changed.nonzero().tolist()                              # sequence, head, query
    [[0, 2, 9]]

    Formula: before the softmax, the scores of the pairs become −∞, so that a row's other weights grow to a sum of 1.
    With `after=True` their weights become 0 after the softmax, and the others stay. A query without any key gives 0.
    `layers`, `heads`, `queries`: see `Edit`. `keys`: positions, as `queries`; in cross attention, those of the source.
    Source: Geva et al. 2023, "Dissecting Recall of Factual Associations in Auto-Regressive Language Models".
    """

    def __init__(
        self,
        layers: Layers = None,
        heads: Heads = None,
        queries: Positions = None,
        keys: Positions = None,
        *,
        after: bool = False,
    ) -> None:
        super().__init__(layers, heads, queries)
        self.keys = checked_positions(keys, "Knockout: keys")
        self.after_softmax = check_flag(after, "Knockout: after")

    def acts(self, spot: Spot) -> bool:
        return bool(self._cut(spot).any())

    def before(self, problem: Problem, spot: Spot) -> Problem:
        return problem if self.after_softmax else without_keys(problem, self._cut(spot))

    def removed(self, spot: Spot) -> np.ndarray | None:
        return self._cut(spot) if self.after_softmax else None

    def _cut(self, spot: Spot) -> np.ndarray:
        return chosen(self.keys, spot.keys, spot.newest)
