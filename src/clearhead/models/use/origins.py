"""What a recording notes of the layers around each attention call, so that `explain` can begin at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from clearhead.explanation.modules.origin.layouts import SIDES
from clearhead.explanation.modules.origin.ran import Layers, Origin, noted, ran
from clearhead.explanation.modules.projection import Linear
from clearhead.models.tap.modules import Notes, Running


class Origins(Notes):
    """The layers that each module has run, with their inputs."""

    def begun(self, kwargs: dict[str, Any]) -> Layers:
        layers = Layers()
        layers.turn(kwargs.get("position_embeddings"))
        return layers

    def ended(
        self, around: Any, inside: Any, module: nn.Module, args: tuple[Any, ...], kwargs: Any, result: Any, name: str
    ) -> None:
        noted(around, module, args, kwargs, result, name)
        around.add(name, inside)

    def projected(self, inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Origin:
        layers = [
            ran(f"in_proj, of {side},", Linear(weight.detach(), None if bias is None else bias.detach()), x)
            for side, x, weight, bias in zip(SIDES, inputs, weights, biases, strict=True)
        ]
        return Origin(layers, len(layers))


def origin_of(running: Running) -> Origin | None:
    """What an attention call that is made now may have come from."""
    layers: Layers | None = running.noted
    if layers is None:
        return None
    layers.attended = True
    return Origin(layers, len(layers), layers.turns)
