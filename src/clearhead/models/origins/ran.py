"""The layers that a module ran around its attention call, with what they were given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clearhead.base.errors import ClearheadError, UnsupportedError
from clearhead.base.torch_state.contexts import without_function_modes
from clearhead.base.torch_state.tensor_kind import has_own_dispatch, is_freed, is_readable
from clearhead.base.torch_state.torch_private import data_address, has_hooks, parts_of
from clearhead.base.torch_state.versions import Versions
from clearhead.explanation.modules.projection import Linear, Norm
from clearhead.models.origins.called import KEPT_WHOLE, CalledLayer, few_rows

Kind = type[Linear] | type[Norm]
Source = Linear | Norm | CalledLayer


@dataclass(frozen=True, eq=False)
class LayerRun:
    """A layer that ran, and its name in the module.

    `source`: its numbers, or the module that gives them when it is called. `versions`: the versions of the tensors that
    it depends on, which tell whether one has been written to since.
    """

    name: str
    source: Source
    versions: Versions

    @property
    def stands(self) -> bool:
        """Whether the numbers are still those that the layer ran with, as far as PyTorch counts."""
        return self.versions.written() is None

    @property
    def kind(self) -> Kind:
        return self.source.kind if isinstance(self.source, CalledLayer) else type(self.source)

    @property
    def out(self) -> int:
        """How many numbers a linear layer makes."""
        if isinstance(self.source, CalledLayer):
            return self.source.out
        assert self.source.weight is not None
        return self.source.weight.shape[0]

    @property
    def layer(self) -> Linear | Norm:
        """The layer. Raises an `UnsupportedError` where the module computes something else."""
        return self.source.read(self.name) if isinstance(self.source, CalledLayer) else self.source

    def can_be_read(self) -> bool:
        """Whether the layer's numbers of this run can still be read."""
        try:
            return self.stands and bool(self.layer)
        except ClearheadError:
            return False


@dataclass(frozen=True, eq=False)
class Ran(LayerRun):
    """A layer with its input, and its result where it ran after attention.

    `inner`: whether it ran in a submodule of the module. `versions`: those of input and result too.
    """

    x: Tensor
    result: Tensor | None = None
    inner: bool = False


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
        self.extend(replace(one, name=f"{name}.{one.name}", inner=True) for one in inside if not one.inner)


class Origin(NamedTuple):
    """The layers and the rotation that a call's tensors may have come from, and the layer that its output went to.

    `ran`: the layers that the module ran, the first `before` of them before the call; the list grows while the module
    runs. `writers`: the layers that were given the outputs of the heads, once they have run, an inner one first;
    they may be in another module. `turns`: the cosines and the sines that the module was given, (B, L, R) each.
    """

    ran: list[Ran]
    before: int
    writers: list[LayerRun]
    turns: tuple[Tensor, Tensor] | None = None

    @property
    def writer(self) -> LayerRun | None:
        """The layer that writes the heads: the outermost, with all that an adapter adds inside of it."""
        return self.writers[-1] if self.writers else None


def ran(name: str, source: Source, x: Tensor, result: Tensor | None = None) -> Ran:
    """A layer as it ran now."""
    x, kept = x.detach(), None if result is None else result.detach()  # a detached tensor counts the same writes
    return Ran(name, source, Versions((name, t) for t in (x, kept, *_tensors(source)) if t is not None), x, kept)


def writer(name: str, source: Source) -> LayerRun:
    """A layer that writes the outputs of heads, with its weights of now."""
    return LayerRun(name, source, Versions((name, t) for t in _tensors(source) if t is not None))


def check_unwritten(versions: Versions, name: str) -> None:
    """Raise where the weights of a layer are not those of the run. `name`: the weights, for the message."""
    found = versions.written()
    if found is not None and is_freed(found[1]):
        raise UnsupportedError(
            f"{name} were freed after the run, as fully_shard frees them.\nKeep them whole: {KEPT_WHOLE}."
        )
    if found is not None:
        raise ClearheadError(f"{name} were written to since the run. Read this before the next step of the optimizer.")


def _tensors(source: Source) -> list[Tensor | None]:
    """The tensors that the numbers of a layer depend on. A weight that is elsewhere between calls has none."""
    if isinstance(source, CalledLayer):
        tensors = (*source.module.parameters(), *source.module.buffers())
        return [tensor for tensor in tensors if not tensor.is_meta]
    return [source.weight, source.bias]


def noted(layers: Layers, inside: Layers, module: nn.Module, args: Sequence[Any], result: Any, name: str) -> Ran | None:
    """Keep a module that has run, if it is a layer of a known kind, and give what was kept. `inside`: the layers that
    ran in it. `args`: all its arguments."""
    if "rotary" in type(module).__name__.lower():
        layers.turn(result)
    given = [t for t in args if isinstance(t, Tensor)]
    if len(given) != 1 or not isinstance(result, Tensor):
        return None
    comparable = all(map(_is_comparable, (given[0], result))) and given[0].shape[:-1] == result.shape[:-1]
    source = _source(module, inside, given[0], result) if comparable else layer_of(module)
    if source is None:
        return None
    one = ran(name, source, given[0], result if layers.attended else None)
    layers.append(one)
    return one


def _is_comparable(tensor: Tensor) -> bool:
    """Whether the vectors of a tensor (..., width) can be read and compared here."""
    plain = not tensor.is_nested and tensor.layout is torch.strided and is_readable(tensor)
    if not plain or tensor.ndim < 2 or not tensor.numel() or not tensor.is_floating_point():
        return False
    # operations on a result of tensor parallelism, which may be on its way still, give plain numbers
    return not has_own_dispatch(tensor) or not has_own_dispatch(tensor[:1].clone())


def _source(module: nn.Module, inside: Layers, x: Tensor, result: Tensor) -> Source | None:
    """The layer that a module is: its numbers, where they are its tensors' own, else a layer that is called.

    A module around a linear layer is one too where it gives the layer its own input and may add to the result, as LoRA
    does. What follows a layer in a sequence is no part of the layer.
    """
    kind, layer = kind_of(module), layer_of(module)
    if kind is None:
        around = any(one.kind is Linear and one.out == result.shape[-1] and same_view(one.x, x) for one in inside)
        kind = Linear if around and not inside.attended and not isinstance(module, nn.Sequential) else None
    if layer is not None and (kind is Norm or not _is_intercepted(module) or _computes(layer, x, result)):
        return layer
    return None if kind is None else CalledLayer(kind, module, x, result)


def same_view(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same view of the same numbers."""
    views = [(data_address(t), t.shape, t.stride()) for t in (one, other)]
    return views[0] == views[1]


def _is_intercepted(module: nn.Module) -> bool:
    """Whether a call of the layer may compute more than its class does with its tensors."""
    known = type(module).forward is nn.Linear.forward or type(module).__module__ == "transformers.pytorch_utils"
    return not known or has_hooks(module)


def _computes(layer: Linear | Norm, x: Tensor, result: Tensor) -> bool:
    """Whether the result is that of the layer's tensors, to the last digits: then no hook has to run again."""
    assert isinstance(layer, Linear)
    rows, wanted = few_rows(x), few_rows(result)
    if rows.device != layer.weight.device or rows.shape[-1] != layer.weight.shape[-1]:
        return False
    with torch.no_grad(), without_function_modes():
        found = torch.nn.functional.linear(rows.to(layer.weight), layer.weight, layer.bias)
    eps = max(torch.finfo(found.dtype).eps, torch.finfo(wanted.dtype).eps)
    bound = max(2 * eps, 4e-6) * found.abs().amax(-1, keepdim=True)
    return found.shape == wanted.shape and bool(((found - wanted).abs() <= bound).all())


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of layer that a module is by its class."""
    kind = type(module).__name__
    if isinstance(module, nn.Linear) or kind == "Conv1D" or "Linear" in kind:  # of other libraries, with other weights
        return Linear
    weight, bias = _held(module, "weight"), _held(module, "bias")
    if not isinstance(module, nn.LayerNorm) and not kind.endswith(("RMSNorm", "L2Norm", "LayerNorm")):
        return None
    if any(t is not None and t.ndim != 1 for t in (weight, bias)) or len(getattr(module, "normalized_shape", "1")) != 1:
        return None  # of more than one axis
    return Norm


def layer_of(module: nn.Module) -> Linear | Norm | None:
    """The layer, read from the tensors that the module holds: a property, as of a parametrization, may draw numbers.

    None for other modules, and where the tensors hold no numbers of their own.
    """
    kind, weight, bias = kind_of(module), _held(module, "weight"), _held(module, "bias")
    if kind is None or not all(t is None or is_plain(t) for t in (weight, bias)):
        return None
    if kind is Norm:
        eps = next((e for e in map(vars(module).get, ("eps", "variance_epsilon")) if isinstance(e, int | float)), 0.0)
        return Norm(_detached(weight), _detached(bias), float(eps), isinstance(module, nn.LayerNorm))
    if weight is None or weight.ndim != 2 or (not isinstance(module, nn.Linear) and type(module).__name__ != "Conv1D"):
        return None
    weight = weight.detach()  # GPT-2's Conv1D has its weight as (in, out)
    return Linear(weight if isinstance(module, nn.Linear) else weight.T, _detached(bias))


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor holds numbers that any operation reads."""
    usual = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return usual and tensor.is_floating_point() and not tensor.is_meta


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def _held(module: nn.Module, name: str) -> Tensor | None:
    parameters, buffers, _ = parts_of(module)
    places = (parameters, buffers, vars(module))
    return next((place[name] for place in places if isinstance(place.get(name), Tensor)), None)
