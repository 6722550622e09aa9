"""The layers that a module ran around its attention call, with what they were given."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from clearhead.explanation.modules.norm import Norm
from clearhead.explanation.modules.projection import Linear


class Ran(NamedTuple):
    """A layer, its name in the module, and its input."""

    name: str
    layer: Linear | Norm
    x: Tensor


class Origin(NamedTuple):
    """What a call may have come from.

    `ran`: the layers that the module ran, the first `before` of them before the call; the list grows while the module
    runs. `turns`: the cosines and the sines that the module was given, (B, L, R) each.
    """

    ran: list[Ran]
    before: int
    turns: tuple[Tensor, Tensor] | None = None


def ran(module: nn.Module, args: tuple[Any, ...], name: str) -> Ran | None:
    """What is kept of a layer that runs; None of other modules."""
    if not args or not isinstance(args[0], Tensor):
        return None
    layer = _layer(module)
    return None if layer is None else Ran(name, layer, args[0].detach())


def _layer(module: nn.Module) -> Linear | Norm | None:
    weight, kind = getattr(module, "weight", None), type(module).__name__
    bias = getattr(module, "bias", None)
    bias = bias.detach() if isinstance(bias, Tensor) else None
    if isinstance(module, nn.Linear) or kind == "Conv1D":  # GPT-2's has its weight as (in, out)
        assert isinstance(weight, Tensor)
        weight = weight.detach()
        return Linear(weight if isinstance(module, nn.Linear) else weight.T, bias)
    if isinstance(module, nn.LayerNorm) or kind.endswith("RMSNorm"):
        eps = next((e for e in (getattr(module, "eps", None), getattr(module, "variance_epsilon", None)) if e), 0.0)
        learnt = weight.detach() if isinstance(weight, Tensor) else None
        return Norm(learnt, bias, float(eps), isinstance(module, nn.LayerNorm))
    return None
