"""Statistics of the weights: the normal form of reductions (`Summary`), and its results (`Found`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.base.output.text import with_outline
from clearhead.problem.problem import Problem

KEYS = ("best_key", "indices")  # the statistics that are key indices, int64


@with_outline
class Summary(NamedTuple):
    """The statistics to compute in one pass over the weights; `Found` has their formulas.

    A field at its default is not computed.

    Attributes:
        output: Whether to compute the output; False by default.
        groups: How much of each key belongs to each of G groups, (B or 1, Lk, G).
        rows: Whether to compute `maximum` and `log_sum`; False by default.
        entropy: Whether to compute the entropy of each query's weights; False by default.
        distance: The position of each query among the keys, int64 (B or 1, 1, Lq), for the mean distance.
        best: Whether to compute the largest score of each query, and its key; False by default.
        top: How many of the largest weights to return; 0 by default.
        scores: Whether to return the scores of these weights too, which order the results of several parts of the keys;
            False by default.
        received: Whether to sum the weights of each key over the queries; False by default.
        mean: The queries and keys in a cell of a map of summed weights.
        peak: The queries and keys in a cell of a map of largest weights.
        factors: Factors of each query's weights in `received` and `mean`, (B or 1, H or 1, Lq).
    """

    output: bool = False
    groups: Tensor | None = None
    rows: bool = False
    entropy: bool = False
    distance: Tensor | None = None
    best: bool = False
    top: int = 0
    scores: bool = False
    received: bool = False
    mean: tuple[int, int] | None = None
    peak: tuple[int, int] | None = None
    factors: Tensor | None = None

    def with_also(self, other: Summary) -> Summary | None:
        """Join two summaries to one pass.

        Args:
            other: The other summary.

        Returns:
            The joined summary; None if the two differ in a size, a position or a factor.
        """
        fields: list[Any] = []
        for mine, theirs, nothing in zip(self, other, self._field_defaults.values(), strict=True):
            if _same(theirs, nothing):
                fields.append(mine)
            elif _same(mine, nothing) or _same(mine, theirs):
                fields.append(theirs)
            else:
                return None
        both = Summary(*fields)
        if self._of_keys and other._of_keys and not _same(self.factors, other.factors):
            return None
        return both if len({both.mean, both.peak} - {None}) < 2 else None

    def shapes(self, problem: Problem) -> dict[str, tuple[int, ...]]:
        """Return the shape of each statistic that the summary requests.

        Args:
            problem: The problem whose weights the statistics describe.

        Returns:
            The shapes, by the names in `Found`.
        """
        batch, heads, queries, keys = problem.sizes.shape
        lead, value, cell = (batch, heads, queries), problem.value, self.mean or self.peak or (1, 1)
        cells = (batch, heads, -(-queries // cell[0]), -(-keys // cell[1]))
        largest = (*lead, self.top)
        found = {
            "output": None if not self.output or value is None else (*lead, value.shape[-1]),
            "groups": None if self.groups is None else (*lead, self.groups.shape[-1]),
            "entropy": lead if self.entropy else None,
            "distance": None if self.distance is None else lead,
            "received": (batch, heads, keys) if self.received else None,
            "mean": cells if self.mean else None,
            "peak": cells if self.peak else None,
            "scores": largest if self.scores else None,
        }
        found |= dict.fromkeys(("maximum", "log_sum"), lead if self.rows else None)
        found |= dict.fromkeys(("best", "best_key"), lead if self.best else None)
        found |= dict.fromkeys(("values", "indices"), largest if self.top else None)
        return {name: shape for name, shape in found.items() if shape is not None}

    @property
    def _of_keys(self) -> bool:
        """Whether the summary has a sum over queries, in which `factors` count."""
        return self.received or self.mean is not None


def of_heads(groups: Tensor, problem: Problem) -> Tensor:
    """Return the groups of a summary as values, (B, Hk, Lk, G), in the dtype of the key."""
    batch, key_heads = problem.key.shape[:2]
    return groups.to(problem.key.dtype).unsqueeze(1).expand(batch, key_heads, -1, -1)


def with_groups(value: Tensor | None, groups: Tensor, problem: Problem) -> Tensor:
    """Append one column for each group to the value: its output is the weight on the group (see `parted`)."""
    columns = of_heads(groups, problem).float()
    return columns if value is None else torch.cat([value, columns], -1)


def _same(one: Any, other: Any) -> bool:
    return one is other or (not (isinstance(one, Tensor) or isinstance(other, Tensor)) and bool(one == other))


@with_outline
class Found(NamedTuple):
    """The statistics of the weights, in float32 or float64; None for each statistic that was not requested.

    In the formulas w are the weights and s the scores with bias and mask. A fully masked row has 0 in all statistics
    but `log_sum` (+∞, see `Partial`), `best` (−∞) and `best_key` (−1).

    Attributes:
        output: Σ_j w_ij value_j, (B, H, Lq, Ev).
        groups: Σ_j w_ij groups_j, (B, H, Lq, G).
        maximum: The largest score or sink of each query, (B, H, Lq). Its gradient is part of that of `log_sum`.
        log_sum: log Σ_j exp(s_ij − maximum_i), including the term of the sink, (B, H, Lq).
        entropy: −Σ_j w_ij log w_ij, (B, H, Lq), of a problem without sinks.
        distance: Σ_j w_ij |position_i − j|, (B, H, Lq).
        best: max_j s_ij, (B, H, Lq).
        best_key: The first key j with this score, int64 (B, H, Lq).
        values: The k largest weights, descending, (B, H, Lq, k).
        indices: The keys of these weights, int64 (B, H, Lq, k).
        scores: The scores of these weights, (B, H, Lq, k); −∞ if fewer keys are allowed. They have no gradient.
        received: Σ_i factor_i w_ij, (B, H, Lk).
        mean: Σ factor_i w_ij over each cell, (B, H, rows, columns).
        peak: max w_ij over each cell, (B, H, rows, columns). It has no gradient.
        finite: True if all inputs are known to be finite, so that a backward pass needs no guard.
    """

    output: Tensor | None = None
    groups: Tensor | None = None
    maximum: Tensor | None = None
    log_sum: Tensor | None = None
    entropy: Tensor | None = None
    distance: Tensor | None = None
    best: Tensor | None = None
    best_key: Tensor | None = None
    values: Tensor | None = None
    indices: Tensor | None = None
    scores: Tensor | None = None
    received: Tensor | None = None
    mean: Tensor | None = None
    peak: Tensor | None = None
    finite: bool = False


def parted(found: Found, value: Tensor | None) -> Found:
    """Split the output of a value `with_groups` into the output and the groups."""
    if value is None or found.output is None:
        return found._replace(output=None, groups=found.output)
    width = value.shape[-1]
    return found._replace(output=found.output[..., :width], groups=found.output[..., width:])


@with_outline
class Sent(NamedTuple):
    """The gradients that statistics send back to the weights, (B, H, Lq, …), besides that of the output, Ȯ_i · V_j.

    Terms that are the same for all keys of a query are in the δ of `Rows`. The two maps have the shapes of `Found`.

    Formula:
        Ṗ_ij += log_weight_i log w_ij + distance_i |position_i − j| + factor_i (received_j + mean_cell(i, j))
        + Σ_t [j = indices_it] values_it
        Ṡ_ij += [j = best_key_i] best_i, at the score itself
    """

    log_weight: Tensor | None = None
    distance: Tensor | None = None
    position: Tensor | None = None  # int64 (B or 1, 1, Lq)
    best: Tensor | None = None
    best_key: Tensor | None = None
    values: Tensor | None = None
    indices: Tensor | None = None  # ascending
    received: Tensor | None = None  # (B, H, Lk)
    mean: Tensor | None = None  # (B, H, rows, columns)
    cell: tuple[int, int] = (1, 1)  # queries and keys to a cell of `mean`
    factors: Tensor | None = None  # (B or 1, H or 1, Lq)

    @property
    def maps(self) -> bool:
        """Whether a sum over queries sends a gradient back. No result of the forward pass gives its part of δ."""
        return self.received is not None or self.mean is not None
