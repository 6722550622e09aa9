"""The result of an engine: the output, and two numbers for the softmax of each query."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.base.output.text import with_outline


@with_outline
class Partial(NamedTuple):
    """Attention over some or all of the keys, with the normalizer of each query's softmax.

    The log of the softmax's denominator is stored as two numbers: their sum would lose digits, because float32 has none
    left for `log_sum` beside a maximum of 1e5. A fully masked row has output 0, maximum 0 and log_sum +∞, so its
    weights are 0.

    Attributes:
        output: The output of each query, (B, H, Lq, Ev).
        maximum: The largest score or sink of each query, (B, H, Lq); None if it was not requested.
        log_sum: log Σ_j exp(s_ij − maximum_i), including the term of the sink, (B, H, Lq); None if it was not
            requested.
        finite: True if all inputs are known to be finite, so that a backward pass needs no guard.

    Formula:
        output_i = Σ_j w_ij value_j, w_ij = exp(s_ij − maximum_i − log_sum_i)
    """

    output: Tensor
    maximum: Tensor | None = None
    log_sum: Tensor | None = None
    finite: bool = False

    def merge(self, other: Partial) -> Partial:
        """Merge two results over disjoint sets of keys to attention over the keys of both.

        See docs/maths/softmax.md. Autograd treats the maxima as constants.

        Args:
            other: The result over the other keys, same shapes; both have `maximum` and `log_sum`.

        Returns:
            The merged result, same shapes.

        Formula:
            The two outputs of a row are added with the weights exp(own log-sum-exp − joint log-sum-exp).
        """
        maximum, log_sum, shares = self.shares(other)
        mine, theirs = (scaled(p.output, share) for share, p in zip(shares, (self, other), strict=True))
        return Partial(mine + theirs, maximum, log_sum)

    def add_(self, other: Partial) -> None:
        """Merge another result into this one in place, without autograd and without memory of the size of the output.

        Args:
            other: The result over the other keys, same shapes. Its output is overwritten.
        """
        *found, shares = self.shares(other)
        for mine, new in zip(rows_of(self), found, strict=True):
            mine.copy_(new)
        self.output.mul_(shares[0].unsqueeze(-1)).add_(other.output.mul_(shares[1].unsqueeze(-1)))

    def at(self, queries: slice) -> Partial:
        """Return the result of some of the queries, as views of the same memory.

        Args:
            queries: The slice of the queries.

        Returns:
            The result, (B, H, queries, …).
        """
        maximum, log_sum = rows_of(self)
        return Partial(self.output[:, :, queries], maximum[:, :, queries], log_sum[:, :, queries])

    def shares(self, other: Partial) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Compute the softmax of two disjoint sets of keys together.

        Args:
            other: The result over the other keys, same shapes.

        Returns:
            The joint maximum and log_sum, (B, H, Lq), and the share of each of the two results in the weights of every
            row.
        """
        mine, theirs = self._rows(), other._rows()
        maximum = torch.maximum(*(m.masked_fill(blind, -torch.inf) for m, _, blind in (mine, theirs)))
        empty = mine[2] & theirs[2]
        maximum = maximum.masked_fill(empty, 0.0)
        # mask the argument of exp in fully masked rows: it could overflow, with a gradient of NaN
        totals = [
            (m - maximum + log_sum).masked_fill(blind, 0.0).exp().masked_fill(blind, 0.0)
            for m, log_sum, blind in (mine, theirs)
        ]
        total = (totals[0] + totals[1]).masked_fill(empty, 1.0)
        return maximum, total.log().masked_fill(empty, torch.inf), [part / total for part in totals]

    def with_sinks(self, sinks: Tensor) -> Partial:
        """Add a sink to each softmax, as one more term in its denominator; call it once, after all keys.

        Args:
            sinks: One logit for each head, (H, 1).

        Returns:
            The result with sinks, same shapes.

        Formula:
            The output is multiplied by 1 / (1 + exp(above)), above = sink − log-sum-exp. The code computes it by
            logsigmoid, so that its gradient, the weight of the sink, keeps its digits where it is small.
        """
        before, log_sum, blind = self._rows()
        maximum = torch.maximum(before, sinks.detach().expand_as(before)).masked_fill(blind, 0.0)
        both = log_add((before - maximum) + log_sum, sinks - maximum).masked_fill(blind, torch.inf)
        above = ((sinks - before) - log_sum).masked_fill(blind, 0.0)
        share = torch.exp(F.logsigmoid(-above)).masked_fill(blind, 0.0)
        return Partial(scaled(self.output, share), maximum, both)

    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return maximum, log_sum, and which rows are fully masked; the log_sum of these rows is 0."""
        maximum, log_sum = rows_of(self)
        blind = log_sum == torch.inf
        return maximum.detach(), log_sum.masked_fill(blind, 0.0), blind


@with_outline
class Rows(NamedTuple):
    """The numbers of each query, (B, H, Lq), that the backward pass reads.

    They belong to the whole softmax, so a problem over some of its keys has the right gradients with them too.

    Formula:
        Ṡ_ij = P_ij (Ṗ_ij − δ_i), δ_i = Σ_j P_ij Ṗ_ij
    """

    maximum: Tensor
    log_sum: Tensor
    delta: Tensor


def rows_of(found: Any) -> tuple[Tensor, Tensor]:
    """Return maximum and log_sum of a `Partial` or a `Found` that has them."""
    assert found.maximum is not None and found.log_sum is not None
    return found.maximum, found.log_sum


def scaled(output: Tensor, share: Tensor) -> Tensor:
    """Multiply the output of each row by its share, output_i · share_i.

    A share of NaN is added instead: as a factor it would make the gradient of the row NaN, and 0 · NaN would reach
    values at masked keys.
    """
    odd = share.detach().isnan()
    added, factor = share.masked_fill(~odd, 0.0), share.masked_fill(odd, 1.0)
    return torch.addcmul(added.unsqueeze(-1), output, factor.unsqueeze(-1))


def log_add(one: Tensor, other: Tensor) -> Tensor:
    """Compute log(exp one + exp other).

    The second derivatives of torch.logaddexp are NaN where the two numbers are far apart.
    """
    more = one.detach() >= other.detach()
    high, low = torch.where(more, one, other), torch.where(more, other, one)
    return high - F.logsigmoid(high - low)


def sinks_gradient(sinks: Tensor, rows: Rows) -> Tensor:
    """Compute the gradient of the sinks, −Σ_i p_sink,i δ_i, (H,), with p_sink,i = exp(sink − maximum_i − log_sum_i)."""
    share = torch.exp(sinks.to(rows.maximum)[:, None] - rows.maximum - rows.log_sum)
    return -(share * rows.delta).sum((0, 2))


def log_sum_exp(maximum: Tensor, log_sum: Tensor) -> Tensor:
    """Return maximum + log_sum of a `Partial`; −∞ for a fully masked row."""
    blind = log_sum == torch.inf
    return (maximum + log_sum).masked_fill(blind, -torch.inf)
