"""An edit: a change of some heads and queries of some layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from clearhead.models.tap.choice import (
    Heads,
    Layers,
    Positions,
    checked_heads,
    checked_layers,
    checked_positions,
    chooses,
    heads_of,
)
from clearhead.models.tap.layers import Site
from clearhead.models.use.edits.spot import Spot
from clearhead.problem.problem import Problem


class Edit:
    """A change of some heads and queries of some layers; all else stays as it is, to the bit. See `edit`.

    >>> import torch, torch.nn.functional as F, clearhead as ch
    >>> class Sharpen(ch.edits.Edit):
    ...     def before(self, problem, spot):
    ...         scores = problem.scores
    ...         return problem._replace(scores=scores._replace(scale=2 * scores.scale))
    >>> class Block(torch.nn.Module):
    ...     def forward(self, x):
    ...         return F.scaled_dot_product_attention(x, x, x)
    >>> block, x = Block(), torch.rand(1, 4, 10, 8)
    >>> with ch.edit(block, Sharpen(heads=2)):
    ...     output = block(x)
    >>> torch.allclose(output[:, 2], ch.attention(2 * x, x, x)[:, 2], atol=1e-6)
    True

    One of your own overrides `before`, `removed` or `factor`. `before` is given the problem of the heads that it
    changes and of no other, those that stand side by side at a time: its query is (B, h, Lq, E), and `spot.heads` has
    their numbers. It gives back a problem of the same sizes, dtype and device; anything else raises a `ClearheadError`
    where the model calls attention. `spot.mask`, `spot.bias` and `spot.tensor` take what is of the whole sequence and
    of all heads, and give the part that is the problem's. Of all edits:
    `layers`: by their numbers in the model, in each of its stacks; by name, "encoder 1" or "decoder 0, cross"; or
    modules by name or pattern ("*.layers.3.*"). `heads`: by their numbers. `queries`: positions in the whole sequence;
    a negative one counts from the newest position that the call knows. Each is a number, a negative one from the end, a
    slice, a name of a layer, or a list of these; None is all. Where nothing tells where queries stand among more keys
    (no cache, mask, alignment), the last one is at the last key.
    """

    factor: float = 1.0  # the output is multiplied by it

    def __init__(self, layers: Layers = None, heads: Heads = None, queries: Positions = None) -> None:
        who = type(self).__name__
        self.layers, self.heads = checked_layers(layers, who), checked_heads(heads, who)
        self.queries = checked_positions(queries, f"{who}: queries")

    def before(self, problem: Problem, spot: Spot) -> Problem:
        """The problem with what this changes before the softmax; `spot` is that of its queries, keys and heads."""
        return problem

    def acts(self, spot: Spot) -> bool:
        """Whether there is anything to change in this call."""
        return True

    def removed(self, spot: Spot) -> np.ndarray | None:
        """The keys, bool (Lk,), whose weights are set to 0 after the softmax."""
        return None

    def chooses(self, site: Site) -> bool:
        """Whether the calls that are made there are changed."""
        return chooses(self.layers, site, type(self).__name__)

    def heads_of(self, count: int, name: str) -> tuple[int, ...]:
        """The heads that are changed, of a module that has `count`."""
        return heads_of(self.heads, count, name, type(self).__name__)

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={_said(value)}" for name, value in vars(self).items() if value is not None)
        return f"{type(self).__name__}({said})"


def _said(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"<{'×'.join(map(str, shape))}>"
