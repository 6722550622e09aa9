"""Edits of the scores: which pairs count, and what is added to them."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from clearhead.base.arrays import Array, check_float, to_tensor
from clearhead.base.errors import ClearheadError
from clearhead.base.numbers import check_flag
from clearhead.base.output.text import brief
from clearhead.base.shapes import placed
from clearhead.biases.base import Added, Bias
from clearhead.masks.base import Mask
from clearhead.masks.dense import DenseMask, check_keep
from clearhead.models.edits.base import Edit
from clearhead.models.edits.spot import Spot, without_keys
from clearhead.models.interception.choice import Heads, Layers, Positions, checked_positions, chosen
from clearhead.problem.problem import Problem
from clearhead.problem.visible import resolve


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


class ForceMask(Edit):
    """Some heads see the keys that a given mask allows, in place of the model's own mask.

    >>> import torch, clearhead as ch
    >>> block, x = ch.nn.DotProductAttention(), torch.rand(1, 4, 10, 8)
    >>> with ch.edit(block, ch.edits.ForceMask(ch.Causal() & ch.SlidingWindow(before=2, after=0))):
    ...     output = block(x, x, x, mask=ch.Causal())
    >>> torch.allclose(output, ch.attention(x, x, x, mask=ch.Causal() & ch.SlidingWindow(before=2, after=0)), atol=1e-6)
    True

    `mask`: a `Mask`, or a bool tensor (..., Lq, Lk) of the whole sequence, True where a query may attend; positions are
    those of the whole sequence, in each step of a generation too. It replaces causality, windows and padding, and
    the cuts of a `Knockout` before it. A bias that the model adds to its scores stays. `layers`, `heads`, `queries`:
    see `Edit`.
    """

    def __init__(
        self, mask: Mask | Array, layers: Layers = None, heads: Heads = None, queries: Positions = None
    ) -> None:
        super().__init__(layers, heads, queries)
        if not isinstance(mask, Mask | Tensor | np.ndarray):
            raise ClearheadError(f"ForceMask: mask is {brief(mask)}; expected a Mask or a bool tensor (True: allowed).")
        if isinstance(mask, DenseMask):
            mask = mask.keep
        if not isinstance(mask, Mask):
            mask = check_keep(to_tensor(mask, "ForceMask: mask"), "ForceMask: mask", mask, "ForceMask(mask == 0)")
        self.mask: Mask | Tensor = mask

    def before(self, problem: Problem, spot: Spot) -> Problem:
        sizes = problem.sizes._replace(leading=None)
        if isinstance(self.mask, Mask):
            visible = spot.mask(self.mask, sizes)
        else:
            keep = placed(spot.tensor(self.mask, "ForceMask: mask"), sizes.device, "ForceMask: mask")
            visible = resolve(DenseMask(keep), sizes, as_written=False)
        problem = problem._replace(visible=visible)
        if spot.unmasked is not None:
            problem = problem._replace(scores=problem.scores._replace(query=spot.unmasked.query))
        unfilled = np.arange(sizes.keys) >= spot.filled
        return without_keys(problem, unfilled) if unfilled.any() else problem


class AddBias(Edit):
    """Adds a bias to the scores of some heads before the softmax.

    >>> import torch, clearhead as ch
    >>> block, x = ch.nn.DotProductAttention(), torch.rand(1, 4, 10, 8)
    >>> with ch.edit(block, ch.edits.AddBias(ch.ALiBi(4))):
    ...     output = block(x, x, x)
    >>> torch.allclose(output, ch.attention(x, x, x, bias=ch.ALiBi(4)), atol=1e-6)
    True

    `bias`: a `Bias`, or a float tensor or a `DenseBias` (..., Lq, Lk) of the whole sequence, with the tokens that are
    still to be generated. It has all the model's heads, whichever of them are changed, or one head that broadcasts.
    Positions are those of the whole sequence. `layers`, `heads`, `queries`: see `Edit`.
    """

    def __init__(
        self, bias: Bias | Array, layers: Layers = None, heads: Heads = None, queries: Positions = None
    ) -> None:
        super().__init__(layers, heads, queries)
        if not isinstance(bias, Bias | Tensor | np.ndarray):
            raise ClearheadError(f"AddBias: bias is {brief(bias)}; expected a Bias, as ALiBi(8), or a float tensor.")
        self.bias: Bias | Tensor = bias if isinstance(bias, Bias) else to_tensor(bias, "AddBias: bias")
        if isinstance(self.bias, Tensor):
            check_float(self.bias, "AddBias: bias")

    def before(self, problem: Problem, spot: Spot) -> Problem:
        added = spot.bias(self.bias, problem.sizes)
        if spot.unmasked is not None:  # a finite mask hides the bias in these rows
            every = added.tile(*(slice(None),) * 4, problem.sizes)
            added = Added(dense=every.expand(problem.sizes.shape).masked_fill(spot.unmasked.blind, 0.0))
        return problem._replace(bias=added if problem.bias is None else problem.bias.plus(added))
