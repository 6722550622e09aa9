"""Which call's heads a linear layer is given, while the model runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import Tensor, nn

from clearhead.explanation.modules.origin.ran import layer_of
from clearhead.explanation.modules.origin.written import given_heads
from clearhead.explanation.modules.projection import Linear
from clearhead.models.checks import run
from clearhead.models.recording import Recording
from clearhead.models.watch import watch


class First(NamedTuple):
    """A first run of a model: its calls, and the name of the linear layer that ran last."""

    seen: Recording
    last: str


def first_run(model: nn.Module, inputs: Any) -> First:
    """A run of the model on these inputs, without gradients."""
    ran = [""]

    def hook(name: str) -> Callable[..., None]:
        return lambda module, args: ran.append(name)

    with watch(model, values=True) as seen, ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(layer_of(module), Linear):
                stack.callback(module.register_forward_pre_hook(hook(name)).remove)
        run(model, inputs)
    return First(seen, ran[-1])


class Writers:
    """The calls of a run whose heads no layer has been given so far."""

    def __init__(self, seen: Recording) -> None:
        self.seen = seen
        self._found: set[int] = set()  # the numbers of the other calls

    def note(self, layer: Linear, x: Tensor) -> int | None:
        """The number of the call whose heads the layer is given now; None where it is given other numbers."""
        for number in range(len(self.seen.calls) - 1, -1, -1):
            outcome = None if number in self._found else self.seen.calls[number].outcome
            if outcome is not None and outcome.output is not None and given_heads(layer, x, outcome.output):
                self._found.add(number)
                return number
        return None
