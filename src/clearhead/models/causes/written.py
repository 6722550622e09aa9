"""The linear layer that writes the outputs of a call's heads, found by the numbers that it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from clearhead.explanation.modules.origin.find import batched, near
from clearhead.explanation.modules.origin.ran import layer_of
from clearhead.explanation.modules.projection import Linear
from clearhead.models.attention_call import AttentionCall
from clearhead.models.checks import run
from clearhead.models.recording import Recording
from clearhead.models.watch import watch


class Writer(NamedTuple):
    """A linear layer (out, H · Ev) that was given the heads of a call side by side, and its module's name."""

    name: str
    module: nn.Module
    layer: Linear


class Writers:
    """The layers that write the heads of each call, which are found while the model runs."""

    def __init__(self, model: nn.Module, seen: Recording) -> None:
        self.model, self.seen = model, seen
        self.found: dict[int, Writer] = {}  # by the number of the call
        self.last = ""  # the name of the linear layer that ran last

    @contextmanager
    def following(self) -> Iterator[None]:
        """A context in which each linear layer of the model is compared with the calls before it."""
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                layer = layer_of(module)
                if isinstance(layer, Linear):
                    stack.callback(module.register_forward_pre_hook(self._hook(name, layer)).remove)
            yield

    def _hook(self, name: str, layer: Linear) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.last = name
            if len(args) == 1 and isinstance(args[0], Tensor):
                self.note(Writer(name, module, layer), args[0])

        return before

    def note(self, writer: Writer, x: Tensor) -> int | None:
        """The number of the call whose heads the layer is given now; None where it is given other numbers."""
        for number in range(len(self.seen.calls) - 1, -1, -1):
            if number in self.found:
                continue
            if side_by_side(self.seen.calls[number], writer.layer, x):
                self.found[number] = writer
                return number
        return None


def side_by_side(call: AttentionCall, layer: Linear, x: Tensor) -> bool:
    heads = None if call.outcome is None else call.outcome.output
    if heads is None or layer.weight.shape[-1] != heads.shape[1] * heads.shape[3]:
        return False
    given = batched(x, heads)
    if given is None or given.shape[-1] != layer.weight.shape[-1]:
        return False
    return near(given.detach(), heads.transpose(1, 2).flatten(2).to(given), heads.dtype)


def found_writers(model: nn.Module, inputs: Any) -> Writers:
    """The layers that write the heads, found in a run of the model on these inputs, without gradients."""
    with watch(model, values=True) as seen:
        writers = Writers(model, seen)
        with writers.following():
            run(model, inputs)
    return writers
