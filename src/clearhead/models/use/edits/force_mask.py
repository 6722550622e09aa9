"""An edit that replaces the model's own mask."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from clearhead.base.arrays import Array, to_tensor
from clearhead.base.errors import ClearheadError
from clearhead.base.shapes import placed
from clearhead.base.text import brief
from clearhead.masks.base import Mask
from clearhead.masks.dense import DenseMask, check_keep
from clearhead.models.tap.choice import Heads, Layers, Positions
from clearhead.models.use.edits.base import Edit
from clearhead.models.use.edits.spot import Spot, without_keys
from clearhead.problem.problem import Problem
from clearhead.problem.visible import resolve


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
            raise ClearheadError(
                f"ForceMask: mask is {brief(mask)}; expected a Mask, such as Causal(), or a bool tensor (True: may "
                "attend)."
            )
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
