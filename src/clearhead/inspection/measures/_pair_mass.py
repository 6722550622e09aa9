"""How much of each query's weight goes to its pairs, by a look at all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.engines.tiled.look import Look
from clearhead.inspection.measures._pairs import Pairs
from clearhead.inspection.reductions.base import Reduction, arange
from clearhead.problem.problem import Problem


class PairMass(Reduction):
    """Σ_j w_ij over the keys that are meant for query i, (B, H, Lq), by a look at each block of rows."""

    along = "queries"

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs

    def begin(self, problem: Problem) -> Tensor:
        dtype = accumulated(problem.query.dtype)
        return torch.zeros(problem.sizes.shape[:3], dtype=dtype, device=problem.sizes.device)

    def look(self, buffers: Tensor, look: Look) -> None:
        batch, _, queries, keys, _ = look.region
        asked, held = (_of(tensor, batch) for tensor in self.pairs[:2])
        places = arange(held.shape[-1], held.device)[keys]
        meant = asked[:, queries, None] == held[:, None, keys]
        if self.pairs.within is not None:
            start, stop = (_of(edge[:, 0], batch)[:, queries, None] for edge in self.pairs.within)
            meant = meant & ((places[:, None] >= start) & (places[:, None] < stop)).any(-1)
        buffers[look.at] = look.weights.masked_fill(~meant.unsqueeze(1), 0.0).sum(-1)


def _of(tensor: Tensor, batch: slice) -> Tensor:
    """Some sequences of a tensor (B or 1, …)."""
    return tensor if tensor.shape[0] == 1 else tensor[batch]
