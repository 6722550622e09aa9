"""Reductions that give a number, or a few, for each query."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.base.arrays import Array, is_dense, is_whole, shown
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.numbers import check_count
from clearhead.base.shapes import placed
from clearhead.inspection.reductions.base import Reduction
from clearhead.masks._read import as_tensor
from clearhead.problem.partial import log_sum_exp, rows_of
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Found, Summary

MEMBERSHIPS = 2**28  # the most numbers of the memberships of `Mass`


def over_keys(problem: Problem) -> Problem:
    """The problem without sinks, whose weights are the weights of the keys divided by their sum."""
    return problem if problem.sinks is None else problem._replace(sinks=None, value=None)


@dataclass(frozen=True, repr=False)
class Entropy(Reduction):
    """The entropy of each query's weights, in nats: 0 for one key, log(n) for n equal ones.

    >>> import torch, clearhead as ch
    >>> ch.weights(torch.zeros(2, 4), torch.zeros(3, 4)).entropy()
    tensor([1.0986, 1.0986])

    Formula: H_i = −Σ_j w_ij log w_ij = log Σ_j exp(s_ij) − Σ_j w_ij s_ij. Gives (..., Lq); 0 where nothing is allowed.
    With sinks, w are the weights of the keys divided by their sum, so the entropy does not depend on the sink, whose
    share is `SinkShare`. Differentiable. Cost: one pass over the allowed pairs, O(Lq) memory.
    Source: Shannon 1948, "A Mathematical Theory of Communication".
    """

    along = "queries"
    gives = "entropy"
    unit = "nats"

    def of(self, problem: Problem) -> Problem:
        return over_keys(problem)

    def summary(self, problem: Problem) -> Summary:
        return Summary(entropy=True)


@dataclass(frozen=True, repr=False)
class LogSumExp(Reduction):
    """The log-sum-exp of each query's scores: a weight is exp(score − this).

    >>> import torch, clearhead as ch
    >>> ch.weights(torch.zeros(2, 4), torch.zeros(3, 4)).reduce(ch.reductions.LogSumExp())
    tensor([1.0986, 1.0986])

    Formula: L_i = log Σ_j exp(s_ij) over the allowed keys, and the sink, if any. Gives (..., Lq); −∞ where no key is
    allowed. Differentiable. Cost: one pass over the allowed pairs, O(Lq) memory.
    """

    along = "queries"

    def summary(self, problem: Problem) -> Summary:
        return Summary(rows=True)

    def found(self, found: Found, problem: Problem) -> Tensor:
        return log_sum_exp(*rows_of(found))


@dataclass(frozen=True, repr=False)
class MaxScore(Reduction):
    """The largest score of each query, as the softmax meets it: scaled, capped, with bias, of an allowed key.

    >>> import torch, clearhead as ch
    >>> ch.weights(torch.ones(1, 1), torch.tensor([[1.0], [3.0], [2.0]])).reduce(ch.reductions.MaxScore())
    tensor([3.])

    Formula: m_i = max_j s_ij over the allowed keys; a sink does not count. Gives (..., Lq); −∞ where nothing is
    allowed. Differentiable: the gradient goes to the score of the first key that has it. It is worth watching in
    training: growing logits make a softmax that sees one key. Cost: one pass over the allowed pairs, O(Lq) memory.
    Source: Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters".
    """

    along = "queries"
    gives = "best"

    def summary(self, problem: Problem) -> Summary:
        return Summary(best=True)


@dataclass(frozen=True, repr=False)
class MeanDistance(Reduction):
    """The mean distance from each query to the keys, by their weights, in positions.

    >>> import torch, clearhead as ch
    >>> ch.weights(torch.zeros(3, 4), torch.zeros(3, 4)).reduce(ch.reductions.MeanDistance())
    tensor([1.0000, 0.6667, 1.0000])

    Formula: d_i = Σ_j w_ij |i + p − j|, where p is the position of query 0. Gives (..., Lq); 0 where nothing is
    allowed. With sinks, w are the weights of the keys divided by their sum. Differentiable.
    Where Lq ≠ Lk, `align=` of `weights` says p, and it is an error where `align=` is missing.
    Cost: one pass over the allowed pairs, O(Lq) memory.
    Source: Vig and Belinkov 2019, "Analyzing the Structure of Attention in a Transformer Language Model".
    """

    along = "queries"
    unit = "positions"
    gives = "distance"

    def check(self, problem: Problem) -> None:
        problem.query_offset("MeanDistance")

    def of(self, problem: Problem) -> Problem:
        return over_keys(problem)

    def summary(self, problem: Problem) -> Summary:
        own = torch.arange(problem.sizes.queries, device=problem.sizes.device).view(1, 1, -1)
        return Summary(distance=own + problem.query_offset("MeanDistance"))


@dataclass(frozen=True, eq=False, repr=False)
class Output(Reduction):
    """The attention output for a value, computed in the same pass as other reductions.

    >>> import torch, clearhead as ch
    >>> query, key, value = torch.rand(3, 2, 50, 16)
    >>> out, entropy = ch.weights(query, key).reduce(ch.reductions.Output(value), ch.reductions.Entropy())
    >>> torch.allclose(out, ch.attention(query, key, value), atol=1e-6)
    True

    Formula: output_i = Σ_j w_ij value_j. `value`: (..., Lk, Ev), as for `attention`. Gives (..., Lq, Ev) of the
    weights' dtype. Differentiable. A call of `reduce` takes at most one. Cost: that of `attention`.
    """

    along = "queries"
    gives = "output"

    value: Array

    def summary(self, problem: Problem) -> Summary:
        return Summary(output=True)


@dataclass(frozen=True, repr=False)
class SinkShare(Reduction):
    """The share of each query's softmax that goes to its head's sink: 1 less the weights of the keys.

    >>> import torch, clearhead as ch
    >>> query, key = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 3, 4)
    >>> ch.weights(query, key, sinks=torch.zeros(1)).reduce(ch.reductions.SinkShare())  # all equal
    tensor([[[0.2500, 0.2500]]])

    Formula: p_i = exp(sink − L_i) = 1 − Σ_j w_ij, L_i the log-sum-exp of keys and sink. Gives (..., Lq); 0 without
    sinks, and where nothing is allowed. Differentiable. Cost: one pass over the allowed pairs, O(Lq) memory.
    Source: Xiao et al. 2024, "Efficient Streaming Language Models with Attention Sinks".
    """

    along = "queries"

    def summary(self, problem: Problem) -> Summary:
        return Summary(rows=True)

    def found(self, found: Found, problem: Problem) -> Tensor:
        maximum, log_sum = rows_of(found)
        if problem.sinks is None:
            return torch.zeros_like(log_sum)
        share = (problem.sinks.to(maximum)[:, None] - maximum) - log_sum
        return share.masked_fill(log_sum == torch.inf, -torch.inf).exp()


@dataclass(frozen=True, repr=False)
class TopK(Reduction[tuple[Tensor, Tensor]]):
    """The k largest weights of each query, and their keys.

    >>> import torch, clearhead as ch
    >>> values, indices = ch.weights(torch.ones(1, 1), torch.tensor([[1.0], [3.0], [2.0]])).topk(2)
    >>> indices
    tensor([[1, 2]])

    Gives values and indices (int64), both (..., Lq, k), descending; equal weights stand in the order of the keys.
    Where a query may see fewer than k keys the rest have value 0, and the index of some other key. Values are
    differentiable.
    Raises a `ClearheadError` where k is not from 1 to Lk.
    Cost: one pass over the allowed pairs, O(Lq·k) memory; for k above 64, k steps a query more.
    """

    along = "queries"

    k: int

    def check(self, problem: Problem) -> None:
        check_count(self.k, 1, "k of topk", most=problem.sizes.keys)

    def summary(self, problem: Problem) -> Summary:
        return Summary(top=int(self.k))

    def found(self, found: Found, problem: Problem) -> tuple[Tensor, Tensor]:
        assert found.values is not None and found.indices is not None
        return found.values, found.indices


@dataclass(frozen=True, eq=False, repr=False)
class Mass(Reduction):
    """The weight of each query on each group of keys, such as the system prompt, each document, or digits.

    >>> import torch, clearhead as ch
    >>> w = ch.weights(torch.zeros(2, 4), torch.zeros(4, 4))
    >>> w.reduce(ch.reductions.Mass([0, 1, 1, 1]))                         # each key's group
    tensor([[0.2500, 0.7500],
            [0.2500, 0.7500]])
    >>> w.reduce(ch.reductions.Mass([[True, True, True, False]]))          # or each group's keys, which may overlap
    tensor([[0.7500],
            [0.7500]])

    Formula: m_ig = Σ_j w_ij [j in g]. `groups`: integers from 0 on, (Lk,) or (B or 1, Lk), the group of each key; or
    bool, (G, Lk). Gives (..., Lq, G), without sinks summing to 1 where groups cover the keys once. Differentiable.
    Raises a `ShapeError` or `ClearheadError` for other groups.
    Cost: that of an output of width G; memory O((Lq + Lk) · G).
    """

    along = "queries"
    gives = "groups"

    groups: Array

    def _members(self, problem: Problem) -> Tensor:
        """(B or 1, Lk, G): 1 where a key belongs to a group."""
        sizes, keys = problem.sizes, problem.sizes.keys
        groups = as_tensor(self.groups, "Mass: groups")
        shape, is_bool = tuple(groups.shape), groups.dtype == torch.bool
        fits = len(shape) == 2 if is_bool else is_whole(groups) and shape[:-1] in ((), (1,), (sizes.batch,))
        if not fits or shape[-1:] != (keys,) or not is_dense(groups):
            raise ShapeError(
                f"Mass: groups is {shown(groups)}; expected the group of each key, integers ({keys},) or "
                f"({sizes.batch} or 1, {keys}), or bool (groups, {keys})."
            )
        groups = placed(groups, sizes.device, "Mass: groups")
        if is_bool:
            return groups.to(problem.key.dtype).T.unsqueeze(0)
        groups = groups.long().reshape(-1, keys)
        least, most = torch.stack(groups.aminmax()).tolist() if groups.numel() else (0, -1)  # read at once
        count = most + 1
        if least < 0:
            raise ClearheadError(
                f"Mass: groups holds {least}; groups count from 0. For keys in no group pass bool, (groups, Lk)."
            )
        if count * groups.numel() > MEMBERSHIPS:
            raise ClearheadError(
                f"Mass: groups holds {count - 1}, which makes {count:,} groups of {keys} keys. Number them without "
                "gaps: torch.unique(groups, return_inverse=True)[1]."
            )
        return (groups.unsqueeze(-1) == torch.arange(count, device=sizes.device)).to(problem.key.dtype)

    def summary(self, problem: Problem) -> Summary:
        return Summary(groups=self._members(problem))
