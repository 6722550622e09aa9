"""The layers that a module ran around its attention call, with what they were given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from clearhead.base.torch_private import parts_of
from clearhead.base.versions import Versions
from clearhead.explanation.modules.projection import Linear, Norm


class Ran(NamedTuple):
    """A layer, its name in the module, and its input; its result, where it ran after attention.

    `inner`: whether it ran in a submodule of the module. `versions`: the versions of all these tensors, which tell
    whether one has been written to since.
    """

    name: str
    layer: Linear | Norm
    x: Tensor
    versions: Versions
    result: Tensor | None = None
    inner: bool = False

    @property
    def stands(self) -> bool:
        """Whether the numbers are still those that the layer ran with, as far as PyTorch counts."""
        return self.versions.written() is None


class Layers(list[Ran]):
    """The layers that a module has run. `attended`: whether it has called attention. `turns`: the cosines and the sines
    of positions, (B, L, R) each, that it was given, or that a submodule returned."""

    attended = False
    turns: tuple[Tensor, Tensor] | None = None

    def turn(self, given: Any) -> None:
        """Keep an argument that may be cosines and sines: a pair of tensors, or one complex tensor (Llama 4)."""
        if isinstance(given, Tensor) and given.is_complex():
            given = given.real, given.imag
        if self.turns is None and isinstance(given, tuple) and len(given) == 2:
            cos, sin = given
            if isinstance(cos, Tensor) and isinstance(sin, Tensor) and cos.shape == sin.shape:
                self.turns = cos.detach(), sin.detach()

    def add(self, name: str, inside: Layers) -> None:
        """Add the layers that the submodule `name` ran itself. Of deeper ones a model would keep all its layers."""
        self.extend(one._replace(name=f"{name}.{one.name}", inner=True) for one in inside if not one.inner)


class Writer(NamedTuple):
    """A linear layer (out, H · Ev) that was given the outputs of a call's heads side by side, and its name.

    `versions`: of its weights, which tell whether they have been written to since.
    """

    name: str
    layer: Linear
    versions: Versions


class Origin(NamedTuple):
    """The layers and the rotation that a call's tensors may have come from, and the layer that its output went to.

    `ran`: the layers that the module ran, the first `before` of them before the call; the list grows while the module
    runs. `writers`: the layer that was given the outputs of the heads, once it has run; it may be in another module.
    `turns`: the cosines and the sines that the module was given, (B, L, R) each.
    """

    ran: list[Ran]
    before: int
    writers: list[Writer]
    turns: tuple[Tensor, Tensor] | None = None


def ran(name: str, layer: Linear | Norm, x: Tensor, result: Tensor | None = None) -> Ran:
    """A layer as it ran now."""
    x, kept = x.detach(), None if result is None else result.detach()  # a detached tensor counts the same writes
    given = (x, kept, layer.weight, layer.bias)
    return Ran(name, layer, x, Versions((name, t) for t in given if t is not None), kept)


def writer(name: str, layer: Linear) -> Writer:
    """A layer that writes the outputs of heads, with its weights of now."""
    return Writer(name, layer, Versions((name, t) for t in layer if t is not None))


def noted(
    layers: Layers, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, name: str
) -> Ran | None:
    """Keep a module that has run, if it is a layer of a known kind, and give what was kept."""
    if "rotary" in type(module).__name__.lower():
        layers.turn(result)
    given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    layer = layer_of(module) if len(given) == 1 and isinstance(result, Tensor) else None
    if layer is None:
        return None
    layers.append(ran(name, layer, given[0], result if layers.attended else None))
    return layers[-1]


def layer_of(module: nn.Module) -> Linear | Norm | None:
    """The layer, read from the tensors that the module holds: a property, as of a parametrization, may draw numbers."""
    kind = type(module).__name__
    weight, bias = _held(module, "weight"), _held(module, "bias")
    if isinstance(module, nn.Linear) or kind == "Conv1D":  # GPT-2's has its weight as (in, out)
        if weight is None or weight.ndim != 2:
            return None
        return Linear(weight if isinstance(module, nn.Linear) else weight.T, bias)
    centred = isinstance(module, nn.LayerNorm)
    if not centred and not kind.endswith(("RMSNorm", "L2Norm", "LayerNorm")):
        return None
    eps = next((e for e in map(vars(module).get, ("eps", "variance_epsilon")) if isinstance(e, int | float)), 0.0)
    if any(t is not None and t.ndim != 1 for t in (weight, bias)) or len(getattr(module, "normalized_shape", "1")) != 1:
        return None  # of more than one axis
    return Norm(weight, bias, float(eps), centred)


def _held(module: nn.Module, name: str) -> Tensor | None:
    parameters, buffers, _ = parts_of(module)
    places = (parameters, buffers, vars(module))
    found = next((place[name] for place in places if isinstance(place.get(name), Tensor)), None)
    floating = found is not None and found.is_floating_point()
    return found.detach() if floating and found is not None else None
