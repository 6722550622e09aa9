"""The weights that measures read: the head's own weights, or uniform weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.contexts import without_autocast
from clearhead.engines.choose import choose
from clearhead.engines.summarised import summarised
from clearhead.engines.tiled.look import Look
from clearhead.inspection.by_head import as_value, of_value
from clearhead.inspection.measures._grouped import Grouped, Pairs
from clearhead.inspection.reductions.base import Reduction
from clearhead.inspection.stream import stream
from clearhead.problem.guard import zero_unseen
from clearhead.problem.partial import log_sum_exp, rows_of
from clearhead.problem.problem import Problem, with_value
from clearhead.problem.summary import Found, Summary
from clearhead.problem.unseen import finite
from clearhead.problem.visible import Visible


class Attention:
    """The weights of a problem without sinks, (B, H, Lq, Lk), and the statistics of them that measures read.

    `placed`: whether the places of queries among the keys are known. `norms`: lengths of vectors, (B, H', Lk) each; H'
    is H, or any number where H is 1. `factor` (B, H, Lq): the number by which each row of the softmax was multiplied;
    `entropy` and `distance` are of the softmax, all else of the product. Queries that see nothing have 0 everywhere.
    Each statistic is found when it is first read.
    """

    def __init__(
        self,
        problem: Problem,
        placed: bool,
        norms: Mapping[str, Tensor] = MappingProxyType({}),
        factor: Tensor | None = None,
    ) -> None:
        self.problem, self.placed, self.norms, self.sizes = problem, placed, norms, problem.sizes
        self._factor = factor

    @cached_property
    def _read(self) -> Problem:
        """The problem as its passes read it: keys that no query sees are zeroed once, if an operand is not finite.
        Masked scores of finite operands do no harm, and there is no value that a weight of 0 would multiply."""
        problem = self.problem
        if problem.visible is not None and finite(problem.query) and finite(problem.key):
            return problem._replace(visible=problem.visible._replace(unseen="none"))
        return zero_unseen(problem)

    @cached_property
    def _found(self) -> Found:
        """The statistics that need whole rows, found in one pass."""
        problem, norms = self._read, self.norms
        if norms:
            problem = self.problem  # the values of keys that no query sees may be anything
            each = torch.stack(list(norms.values()), -1)  # (B, H', Lk, n)
            problem = with_value(problem, as_value(each, problem.key.shape[1]))
        distance = positions(problem).unsqueeze(1) if self.placed else None
        summary = Summary(output=bool(norms), rows=True, entropy=True, distance=distance, received=True)
        summary = summary._replace(factors=self._factor)
        return _summarised(problem, summary)

    @property
    def entropy(self) -> Tensor:
        """The entropy in nats, (B, H, Lq)."""
        return _known(self._found.entropy)

    @property
    def received(self) -> Tensor:
        """The weight that each key receives from all queries, (B, H, Lk)."""
        return _known(self._found.received)

    @property
    def distance(self) -> Tensor:
        """The mean distance to the keys, in positions, (B, H, Lq)."""
        return _known(self._found.distance)

    def moved(self, name: str) -> Tensor:
        """Σ_j w_ij norms_j, (B, H, Lq); where one head's weights stand for all, of each head of the norms."""
        found = of_value(_known(self._found.output), len(self.norms))[..., list(self.norms).index(name)]
        return self._multiplied(found)

    @cached_property
    def log_sum_exp(self) -> Tensor:
        """The log-sum-exp of the scores, (B, H, Lq); of uniform attention the log of the number of keys."""
        return log_sum_exp(*rows_of(self._found))

    def on(self, some: Visible) -> Tensor:
        """The weight of each query on the keys of a narrower mask, (B, H, Lq)."""
        problem = self._read
        if finite(problem.query) and finite(problem.key):
            some = some._replace(unseen="none")
        return self._share(*rows_of(_summarised(problem._replace(visible=some), Summary(rows=True))))

    def on_pairs(self, pairs: Pairs, groups: Grouped | None) -> Tensor:
        """The weight of each query on the keys with its token, (B, H, Lq). `groups`: these pairs, sorted. Where it is
        None, or a bias depends on places, all pairs are looked at."""
        if groups is None or self.problem.bias is not None:
            found: Tensor = stream(self.problem, choose(self.problem, None), (PairMass(pairs),))[0]
            return self._multiplied(found)
        rows = rows_of(_summarised(groups.of(self.problem), Summary(rows=True)))
        return self._share(*(groups.back(row) for row in rows))

    def _share(self, maximum: Tensor, log_sum: Tensor) -> Tensor:
        """Σ_j w_ij over some keys: exp(their log-sum-exp − the log-sum-exp of all keys), each given as two numbers."""
        of_all, log_sum_of_all = rows_of(self._found)
        found = ((maximum - of_all) + (log_sum - log_sum_of_all)).exp_()
        found.masked_fill_(log_sum == torch.inf, 0.0)  # a query sees none of these keys, even in a row of NaN
        return self._multiplied(found)

    def _multiplied(self, found: Tensor) -> Tensor:
        """A sum over the weights of each row, (B, H, Lq), times the row's factor."""
        return found if self._factor is None else found * self._factor.to(found.dtype)


def _summarised(problem: Problem, summary: Summary) -> Found:
    with without_autocast(problem.sizes.device):
        return summarised(problem, choose(problem._replace(value=None), None), summary)


def _known(found: Tensor | None) -> Tensor:
    assert found is not None
    return found


def positions(problem: Problem) -> Tensor:
    """Where each query stands among the keys, int64 (B or 1, Lq)."""
    sizes = problem.sizes
    offset = problem.query_offset("measures")
    own = torch.arange(sizes.queries, device=sizes.device)[None]
    return own + (offset[:, 0] if isinstance(offset, Tensor) else offset)


class PairMass(Reduction):
    """Σ_j w_ij over the keys that are paired with query i, (B, H, Lq), by a look at each block of rows."""

    along = "queries"

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs

    def begin(self, problem: Problem) -> Tensor:
        dtype = accumulated(problem.query.dtype)
        return torch.zeros(problem.sizes.shape[:3], dtype=dtype, device=problem.sizes.device)

    def look(self, buffers: Tensor, look: Look) -> None:
        batch, _, queries, keys, _ = look.region
        asked, held = (_of(tensor, batch) for tensor in self.pairs[:2])
        places = torch.arange(held.shape[-1], device=held.device)[keys]
        meant = asked[:, queries, None] == held[:, None, keys]
        if self.pairs.within is not None:
            start, stop = (_of(edge[:, 0], batch)[:, queries, None] for edge in self.pairs.within)
            meant = meant & ((places[:, None] >= start) & (places[:, None] < stop)).any(-1)
        buffers[look.at] = look.weights.masked_fill(~meant.unsqueeze(1), 0.0).sum(-1)


def _of(tensor: Tensor, batch: slice) -> Tensor:
    """The part of a tensor (B or 1, …) for some sequences."""
    return tensor if tensor.shape[0] == 1 else tensor[batch]
