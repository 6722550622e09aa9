"""A further bias on the scores."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from clearhead.base.arrays import Array, check_float, to_tensor
from clearhead.base.errors import ClearheadError
from clearhead.base.text import brief
from clearhead.biases.base import Added, Bias
from clearhead.models.tap.choice import Heads, Layers, Positions
from clearhead.models.use.edits.base import Edit
from clearhead.models.use.edits.spot import Spot
from clearhead.problem.problem import Problem


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
            raise ClearheadError(
                f"AddBias: bias is {brief(bias)}; expected a Bias, such as ALiBi(num_heads), or a float tensor."
            )
        self.bias: Bias | Tensor = bias if isinstance(bias, Bias) else to_tensor(bias, "AddBias: bias")
        if isinstance(self.bias, Tensor):
            check_float(self.bias, "AddBias: bias")

    def before(self, problem: Problem, spot: Spot) -> Problem:
        added = spot.bias(self.bias, problem.sizes)
        if spot.unmasked is not None:  # a finite mask hides the bias in these rows
            every = added.tile(*(slice(None),) * 4, problem.sizes)
            added = Added(dense=every.expand(problem.sizes.shape).masked_fill(spot.unmasked.blind, 0.0))
        return problem._replace(bias=added if problem.bias is None else problem.bias.plus(added))
