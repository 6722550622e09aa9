"""A run of a model in which the residual stream alone has a gradient, so that each layer has its direct effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from clearhead.base.errors import UnsupportedError
from clearhead.base.torch_private import parts_of, tree_map_only
from clearhead.explanation.modules.origin.find import near
from clearhead.explanation.modules.origin.ran import layer_of
from clearhead.explanation.modules.projection import Linear, Norm
from clearhead.models.causes.written import Writer, Writers


class Written(NamedTuple):
    """A layer's result as it entered the residual stream, with a gradient. `call`: the number of the call whose heads
    the layer was given; None for other layers."""

    name: str
    result: Tensor
    call: int | None
    layer: Any


class Frozen:
    """Hooks on the modules of a model, so that a gradient flows through its residual stream and nowhere else.

    - A layer with weights of two axes or more takes its inputs as constants, and its result is a leaf of the graph:
      linear layers, embeddings, experts. Layers behind the last block, such as the unembedding, stay in the graph.
    - A norm divides by its size of this run, a constant, so it is linear in its input.

    `before`: the writers that a run on the same inputs has found. `now`: those of the run with these hooks.
    """

    def __init__(self, model: nn.Module, before: Writers, now: Writers) -> None:
        self.model, self.before, self.writers = model, before, now
        self.blocks = {_block(call.name) for call in before.seen.calls}
        self.written: list[Written] = []
        self._running: dict[int, tuple[bool, int | None]] = {}  # by module: whether it is cut, and its call

    @contextmanager
    def hooked(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                layer = layer_of(module)
                if isinstance(layer, Norm):
                    stack.callback(module.register_forward_hook(self._linear(name, layer)).remove)
                elif layer is None and "Norm" in type(module).__name__:
                    stack.callback(module.register_forward_hook(self._unknown(name)).remove)
                elif self._learns_matrix(module):
                    before, after = self._cut(name, layer)
                    stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(after).remove)
            yield

    @staticmethod
    def _learns_matrix(module: nn.Module) -> bool:
        return any(weight is not None and weight.ndim >= 2 for weight in parts_of(module)[0].values())

    def _behind(self, name: str) -> bool:
        """Whether a module runs behind the last block, so that its input is the residual stream."""
        if len(self.writers.seen.calls) < len(self.before.seen.calls):
            return False
        if "" in self.blocks:  # the names of the modules do not show where a block ends
            return name == self.before.last
        return not any(name == block or name.startswith(f"{block}.") for block in self.blocks)

    def _cut(self, name: str, layer: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The hooks that run before and after a module with weights."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            number = None
            if isinstance(layer, Linear) and len(args) == 1 and isinstance(args[0], Tensor):
                number = self.writers.note(Writer(name, module, layer), args[0])
            cut = number is not None or not self._behind(name)
            self._running[id(module)] = cut, number
            return tree_map_only(Tensor, Tensor.detach, (args, kwargs)) if cut else None

        def after(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
            cut, number = self._running.pop(id(module))

            def leaf(one: Tensor) -> Tensor:
                if not one.is_floating_point():
                    return one
                own = one.detach().requires_grad_()
                self.written.append(Written(name, own, number, layer))
                return own

            return tree_map_only(Tensor, leaf, result) if cut else None

        return before, after

    @staticmethod
    def _linear(name: str, norm: Norm) -> Callable[..., Any]:
        """The hook that makes a norm linear in its input."""

        def after(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
            if len(args) != 1 or not isinstance(args[0], Tensor) or not args[0].requires_grad:
                return None
            given = args[0]
            slope, centred = _slope(name, norm, given.detach(), result.detach())
            moved = given - given.mean(-1, keepdim=True) if centred else given
            through = moved * slope
            return result.detach() + (through - through.detach())

        return after

    @staticmethod
    def _unknown(name: str) -> Callable[..., Any]:
        """The hook of a norm of another kind, which is an error where it stands in the residual stream."""

        def after(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            if any(isinstance(one, Tensor) and one.requires_grad for one in args):
                raise _other_norm(name, module)

        return after


def _slope(name: str, norm: Norm, given: Tensor, result: Tensor) -> tuple[Tensor, bool]:
    """What a norm multiplies each number by at its size in this run, and whether it takes the mean away first.

    Gemma's norms learn the factor less 1, and T5's layer norm takes no mean away: the numbers say which it is.
    """
    x, wanted = given.double(), result.double()
    own = norm.to(x)
    shift = 0.0 if own.bias is None else own.bias
    for centred in (norm.centred, not norm.centred):
        inner = x - x.mean(-1, keepdim=True) if centred else x
        size = (inner.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
        weights = [x.new_ones(())] if own.weight is None else [own.weight, 1.0 + own.weight]
        for weight in weights:
            if near(inner * size * weight + shift, wanted, result.dtype):
                return (size * weight).to(given.dtype), centred
    raise UnsupportedError(
        f"{name} gives other numbers than a layer norm or an RMS norm with its weights, so what a head adds to the "
        "logit behind it is not known."
    )


def _other_norm(name: str, module: nn.Module) -> UnsupportedError:
    return UnsupportedError(
        f"{name} is a {type(module).__name__} in the residual stream. What a head adds to the logit behind it is known "
        "for layer norms and RMS norms."
    )


def _block(name: str) -> str:
    """The path of the block that a module of attention is in: up to the first number in its name."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    return "" if number is None else ".".join(parts[: number + 1])
