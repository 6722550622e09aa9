"""An edit that changes weights by a function."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.text import brief
from clearhead.models.tap.choice import Heads, Layers, Positions
from clearhead.models.use.edits.base import Edit
from clearhead.models.use.edits.spot import Spot


class MapWeights(Edit):
    """Changes the weights of some heads by a function, after the softmax.

    >>> import torch, clearhead as ch
    >>> block, x = ch.nn.DotProductAttention(), torch.rand(1, 4, 10, 8)
    >>> sharper = lambda w: w**2 / (w**2).sum(-1, keepdim=True)
    >>> with ch.edit(block, ch.edits.MapWeights(sharper, heads=2)):
    ...     output = block(x, x, x, mask=ch.Causal())
    >>> w = ch.weights(x, x, mask=ch.Causal())[0, 2]
    >>> torch.allclose(output[0, 2], sharper(w) @ x[0, 2], atol=1e-6)
    True

    Formula: O = f(W) V, with the weights W of the heads and queries that are changed, and the model's own values V.
    `function`: takes W, a tensor (B, h, q, Lk), and gives another of the same shape, dtype and device; it may write to
    W. W is float32, or float64 in a float64 model. It is called once for each run of neighbouring heads; in a
    generation q counts the new tokens, and Lk all keys. Rows need not sum to 1: divide them by their sum in the
    function where they should; pages and gradients of a recorded call need it. Numbers below 0 are allowed, but `watch`
    refuses them, since a record has the logarithm of each weight.
    The mask holds: a pair that it hides has weight 0 in W, and 0 again whatever the function gives. To open such pairs,
    put a `ForceMask` before this edit. In a head with a sink, W has no column for it, and its rows sum to less than 1.
    Edits of scores come before it, other changes of weights in the order of the edits, and factors and changes of the
    output after it. Gradients flow through the function. `layers`, `heads`, `queries`: see `Edit`.
    Raises a `ShapeError` where the model calls attention if the function gives anything else than such a tensor.
    Cost: the whole matrix of the changed heads and queries, B · h · q · Lk numbers, beside those that the function
    makes; other edits need no matrix.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        layers: Layers = None,
        heads: Heads = None,
        queries: Positions = None,
    ) -> None:
        super().__init__(layers, heads, queries)
        if not callable(function):
            raise ClearheadError(
                f"MapWeights: function is {brief(function)}; expected a function of the weights (B, h, q, Lk), such as "
                "lambda w: w / w.sum(-1, keepdim=True)."
            )
        self.function = function

    def weights(self, weights: Tensor, spot: Spot) -> Tensor:
        return self.function(weights)
