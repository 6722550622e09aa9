"""The base class of edits: changes of some heads and queries of some layers."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from clearhead.models.edits.spot import Spot
from clearhead.models.interception.choice import (
    Heads,
    Layers,
    Positions,
    checked_layers,
    checked_positions,
    chooses,
    heads_of,
)
from clearhead.models.interception.layers import Site
from clearhead.problem.problem import Problem


class Edit:
    """A change of some heads and queries of some layers. Everything else stays the same to the bit. See `edit`.

    >>> import torch, clearhead as ch
    >>> class Sharpen(ch.edits.Edit):
    ...     def before(self, problem, spot):
    ...         scores = problem.scores
    ...         return problem._replace(scores=scores._replace(scale=2 * scores.scale))
    >>> block, x = ch.nn.DotProductAttention(), torch.rand(1, 4, 10, 8)
    >>> with ch.edit(block, Sharpen(heads=2)):
    ...     output = block(x, x, x)
    >>> torch.allclose(output[:, 2], ch.attention(2 * x, x, x)[:, 2], atol=1e-6)
    True

    An edit of your own overrides `before`, `weights`, `after`, `removed` or `factor`. `before` is given the problem of
    the heads that it changes, and of no others. It is called once for each run of neighbouring heads: the query is
    (B, h, Lq, E), and `spot.heads` has the numbers of the heads. It returns a problem of the same sizes, dtype and
    device; any other result raises a `ClearheadError` where the model calls attention. `weights` is given the weights
    (B, h, q, Lk) of the heads and queries that it changes, see `MapWeights`, and `after` their output (B, h, q, Ev);
    `spot.rows` has the positions of these queries. Each returns a tensor of the same shape, dtype and device.
    `spot.mask`, `spot.bias` and `spot.tensor` take a mask, a bias or a tensor of the whole sequence and of all heads,
    and return its part for the problem. All edits have these arguments. `layers`: numbers in the model, in each of its
    stacks; names such as "encoder 1" or "decoder 0, cross"; or names and patterns of modules ("*.layers.3.*").
    `heads`: numbers. `queries`: positions in the whole sequence; a negative position counts from the newest position
    that the call knows. Each argument is a number, where negative numbers count from the end, a slice, a name of a
    layer, or a list of these; None takes all. Where no cache, mask or alignment shows where the queries stand among
    more keys, the last query is at the last key.
    """

    factor: float = 1.0  # the factor of the output
    sequences: slice = slice(None)  # the sequences of the batch that are changed: a sweep gives each edit its own

    def __init__(self, layers: Layers = None, heads: Heads = None, queries: Positions = None) -> None:
        who = type(self).__name__
        checked_positions(heads, f"{who}: heads")
        self.layers, self.heads = checked_layers(layers, who), heads
        self.queries = checked_positions(queries, f"{who}: queries")

    def before(self, problem: Problem, spot: Spot) -> Problem:
        """The problem with this edit's changes before the softmax. `spot`: the place of its queries, keys and heads."""
        return problem

    def weights(self, weights: Tensor, spot: Spot) -> Tensor:
        """The weights (B, h, q, Lk) after the softmax with this edit's changes. `spot.rows`, `spot.keys`: positions."""
        return weights

    def after(self, output: Tensor, spot: Spot) -> Tensor:
        """The output (B, h, q, Ev) with this edit's changes. `spot.rows`: the positions of its queries."""
        return output

    def acts(self, spot: Spot) -> bool:
        """Whether this edit changes anything in this call."""
        return True

    def removed(self, spot: Spot) -> np.ndarray | None:
        """The keys, bool (Lk,), whose weights are set to 0 after the softmax."""
        return None

    def chooses(self, site: Site) -> bool:
        """Whether the calls that a layer makes are changed."""
        return chooses(self.layers, site, type(self).__name__)

    def heads_of(self, count: int, name: str) -> tuple[int, ...]:
        """The numbers of the heads that are changed in a module with `count` heads."""
        return heads_of(self.heads, count, name, type(self).__name__)

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={_said(value)}" for name, value in vars(self).items() if value is not None)
        return f"{type(self).__name__}({said})"


def _said(value: Any) -> str:
    shape, function = getattr(value, "shape", None), getattr(value, "__name__", None)
    return function or (repr(value) if shape is None else f"<{'×'.join(map(str, shape))}>")
