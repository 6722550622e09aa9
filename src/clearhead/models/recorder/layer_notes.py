"""The layers that run beside the attention calls of a model, as the recorder notes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from clearhead.base.torch_state.contexts import without_autocast, without_function_modes
from clearhead.explanation.modules.projection import Linear
from clearhead.models.interception.modules import Notes, Projection, Running, Tensors
from clearhead.models.origins.find import SIDES, writes
from clearhead.models.origins.ran import Layers, Origin, Ran, noted, ran, writer
from clearhead.models.recordings.call import Outcome

WAITING = 4  # the most calls of which the layer that writes their heads is still looked for


class Origins(Notes):
    """Notes the layers that each module has run, with their inputs, so that `explain` can begin at them, and the layer
    that was given the heads of each call."""

    def __init__(self) -> None:
        self._unwritten = deque[tuple[Outcome, Origin]](maxlen=WAITING)
        self._newest: Origin | None = None  # whose layer was found last

    def made(self, outcome: Outcome, origin: Origin) -> None:
        """A call was made, whose output a layer may read that runs later."""
        if not origin.writers:
            self._unwritten.append((outcome, origin))

    def begun(self, kwargs: dict[str, Any]) -> Layers:
        layers = Layers()
        layers.turn(kwargs.get("position_embeddings"))
        return layers

    def ended(self, around: Any, inside: Running, result: Any, name: str) -> None:
        # a layer that cannot be read is not among the layers that were found; the watch's function mode costs more than
        # what is read here
        with suppress(Exception), without_function_modes():
            layers, args = inside.noted, (*inside.args, *inside.kwargs.values())
            one = noted(around, layers, inside.module, args, result, name)
            if one is not None and one.kind is Linear and not self._written_around(one, layers) and self._unwritten:
                with without_autocast(one.x.device):
                    self._written(one, result)
        around.add(name, inside.noted)

    def _written(self, one: Ran, result: Tensor) -> None:
        for waiting in reversed(tuple(self._unwritten)):
            outcome, origin = waiting
            if outcome.output is not None and writes(one, result, outcome.output):
                origin.writers.append(writer(one.name, one.source))
                self._newest = origin
                with suppress(ValueError):  # another thread was faster
                    self._unwritten.remove(waiting)
                return

    def _written_around(self, one: Ran, inside: Layers) -> bool:
        """Whether the layer that writes the heads ran inside of this one, as in an adapter, which then writes them."""
        if self._newest is None or all(ran.source is not self._newest.writers[-1].source for ran in inside):
            return False
        self._newest.writers.append(writer(one.name, one.source))
        return True

    def projected(self, inputs: Tensors, weights: Tensors, biases: Sequence[Tensor | None], last: Projection) -> Origin:
        each = zip(SIDES, inputs, weights, biases, strict=True)
        layers = [ran(f"in_proj, of {side},", _linear(weight, bias), x) for side, x, weight, bias in each]
        return Origin(layers, len(layers), [writer("out_proj", _linear(*last))])


def _linear(weight: Tensor, bias: Tensor | None) -> Linear:
    return Linear(weight.detach(), None if bias is None else bias.detach())


def origin_of(running: Running) -> Origin | None:
    """The layers that may have made the inputs of the attention call that is made now."""
    layers: Layers | None = running.noted
    if layers is None:
        return None
    layers.attended = True
    return Origin(layers, len(layers), [], layers.turns)
