"""Whether a linear layer writes the outputs of a call's heads, by the numbers that it is given and gives."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.tensor_kind import has_own_dispatch, is_freed, is_readable
from clearhead.explanation.modules.origin.chain import doubt, taken
from clearhead.explanation.modules.origin.find import PROBES, batched, near
from clearhead.explanation.modules.origin.ran import Ran
from clearhead.explanation.modules.projection import Linear

ROWS = 64  # of a layer, whose results are compared


def given_heads(x: Tensor, heads: Tensor) -> bool:
    """Whether a layer with this input was given the outputs of all heads, (B, H, Lq, Ev), side by side."""
    joined, given = heads.shape[1] * heads.shape[3], batched(x, heads)
    if given is None or given.shape[-1] != joined:
        return False
    return near(given.detach(), heads.transpose(1, 2).flatten(2).to(given), heads.dtype)


def gives(layer: Linear, x: Tensor, result: Tensor, dtype: torch.dtype) -> bool:
    """Whether the layer's result (B, L, out) is that of its weights and bias on x, (B, L, in)."""
    x = x.to(accumulated(dtype))
    layer = layer.to(x)
    made = torch.nn.functional.linear(x, layer.weight, layer.bias)
    return made.shape == result.shape and near(made, result.to(made), dtype, doubt(layer, x, 1).squeeze(2))


def writes(ran: Ran, result: Tensor, heads: Tensor) -> bool:
    """Whether a layer that has just run was given these heads, and gave what its weights make of them. The latter
    is tried at a few positions, for some numbers of the result; for a layer that is called, when it is read."""
    layer = ran.source
    if ran.kind is not Linear or not is_readable(ran.x) or has_own_dispatch(ran.x):
        return False
    if not isinstance(layer, Linear):
        return given_heads(ran.x, heads)
    if is_freed(layer.weight) or not given_heads(ran.x, heads):
        return False
    x, wanted = batched(ran.x, heads), batched(result.detach(), heads)
    if x is None or wanted is None:
        return False
    places, rows = (_few(n, most) for n, most in ((x.shape[1], PROBES), (layer.weight.shape[0], ROWS)))
    some = layer.rows(torch.tensor(rows, device=layer.weight.device))
    return gives(some, taken(x, 1, places), taken(taken(wanted, 1, places), 2, rows), heads.dtype)


def _few(count: int, most: int) -> list[int]:
    """At most so many of the numbers below `count`, evenly spaced, the first and the last among them."""
    return sorted({n * (count - 1) // (most - 1) for n in range(most)}) if count else []
