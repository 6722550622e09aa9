"""The weights that measures read: a head's own, or uniform ones."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from clearhead.base.positions import query_offset
from clearhead.inspection.measures._pair_mass import PairMass
from clearhead.inspection.measures.base import Rule
from clearhead.inspection.reductions.entropy import Entropy
from clearhead.inspection.reductions.mean_distance import MeanDistance
from clearhead.inspection.reductions.received import Received
from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.problem.problem import Problem
from clearhead.problem.record import now

TILE = 2**18  # weights at once where each query is asked for one key
ROWS = 256  # and the most queries


class Attention:
    """The weights of a problem without sinks, (B, H, Lq, Lk), and what measures read of them; all found lazily.

    `placed`: whether it is known where queries stand among the keys. Queries that see nothing have 0 everywhere.
    """

    def __init__(self, problem: Problem, placed: bool) -> None:
        self.placed, self.sizes = placed, problem.sizes
        self.weights = Weights(FromRecord(now(problem), {}))

    @cached_property
    def _found(self) -> tuple[Any, ...]:
        wanted = (Entropy(), Received(), *((MeanDistance(),) if self.placed else ()))
        return self.weights.reduce(*wanted)

    @property
    def entropy(self) -> Tensor:
        """In nats, (B, H, Lq)."""
        return self._tensor(0)

    @property
    def received(self) -> Tensor:
        """What each key receives of all queries, (B, H, Lk)."""
        return self._tensor(1)

    @property
    def distance(self) -> Tensor:
        """The mean distance to the keys, in positions, (B, H, Lq)."""
        return self._tensor(2)

    def _tensor(self, number: int) -> Tensor:
        found: Tensor = self._found[number]
        return found

    @cached_property
    def log_sum_exp(self) -> Tensor:
        """Of the scores, (B, H, Lq); of uniform attention, whose scores are 0, the log of the number of keys."""
        found: Tensor = self.weights.logsumexp()
        return found

    def on(self, keys: Tensor) -> Tensor:
        """The weight of each query on one key, (B, H, Lq). `keys`: int64 (B or 1, Lq), −1 for none, which gives 0.

        Of the scores of the few pairs around them, and the log-sum-exp of their rows.
        """
        batch, heads, queries, _ = self.sizes.shape
        assert self.log_sum_exp.shape == (batch, heads, queries)  # which the weights remember: a part needs no row
        found = torch.zeros(batch, heads, queries, dtype=self.weights.dtype, device=self.sizes.device)
        together = [slice(0, batch)] if keys.shape[0] == 1 else [slice(b, b + 1) for b in range(batch)]
        for some in together:
            each = heads * (some.stop - some.start)
            rows = max(1, min(ROWS, math.isqrt(TILE // max(each, 1))))
            own = keys[some.start if keys.shape[0] > 1 else 0]
            host = own.cpu()
            for row in range(0, queries, rows):
                at, wanted = own[row : row + rows], host[row : row + rows]
                there = wanted >= 0
                if not bool(there.any()):
                    continue
                low, high = int(wanted[there].min()), int(wanted[there].max()) + 1
                tile: Tensor = self.weights[some, :, row : row + rows, low:high]
                place = (at - low).clamp(0, high - low - 1)[:, None].expand(*tile.shape[:3], 1)
                found[some, :, row : row + rows] = tile.gather(-1, place)[..., 0].masked_fill(at < 0, 0.0)
        return found

    def on_pairs(self, rule: Rule) -> Tensor:
        """The weight of each query on the keys that a rule names, (B, H, Lq): a look at each block of rows."""
        found: Tensor = self.weights.reduce(PairMass(rule))[0]
        return found

    def moved(self, norms: Tensor) -> Tensor:
        """Σ_j w_ij norms_j, (B, H or that of norms, Lq). `norms`: (B, Hk, Lk), Hk = H or a divisor of it.

        Where the weights are those of one head for all, each of the norms' heads has its sum.
        """
        if self.sizes.heads == 1:
            together: Tensor = self.weights @ norms.transpose(1, 2).unsqueeze(1)
            return together[:, 0].transpose(1, 2)
        alone: Tensor = self.weights @ norms.unsqueeze(-1)
        return alone[..., 0]


def positions(problem: Problem) -> Tensor:
    """Where each query stands among the keys, int64 (B or 1, Lq)."""
    sizes = problem.sizes
    offset = query_offset(sizes, "measures")
    own = torch.arange(sizes.queries, device=sizes.device)[None]
    return own + (offset.reshape(-1, 1) if isinstance(offset, Tensor) else offset)
