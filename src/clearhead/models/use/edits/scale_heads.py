"""An edit that multiplies the outputs of some heads."""

from __future__ import annotations

from clearhead.base.numbers import check_number
from clearhead.models.tap.choice import Heads, Layers, Positions
from clearhead.models.use.edits.base import Edit


class ScaleHeads(Edit):
    """Multiplies the outputs of some heads by a number; 0 ablates them.

    >>> import torch, clearhead as ch
    >>> block, x = ch.nn.DotProductAttention(), torch.rand(1, 4, 10, 8)
    >>> with ch.edit(block, ch.edits.ScaleHeads(heads=[0, 3], factor=0.0)):
    ...     output = block(x, x, x)
    >>> output.abs().amax((0, 2, 3)).count_nonzero()
    tensor(2)

    Formula: O_i becomes `factor` · O_i, before the projection that joins the heads. `layers`, `heads`, `queries`: see
    `Edit`. Source: Michel et al. 2019, "Are Sixteen Heads Really Better than One?".
    """

    def __init__(
        self, layers: Layers = None, heads: Heads = None, factor: float = 0.0, queries: Positions = None
    ) -> None:
        super().__init__(layers, heads, queries)
        self.factor = check_number(factor, "ScaleHeads: factor")
