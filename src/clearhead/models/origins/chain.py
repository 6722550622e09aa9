"""From a layer's input to the query, the key or the value of some heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.base.symbolic.steps import Step, made
from clearhead.explanation.modules.projection import (
    Linear,
    Norm,
    norm_steps,
    partner_step,
    projection_steps,
    split,
    turned_step,
)
from clearhead.models.origins.ran import Ran

AXES = {"query": "Lq", "key": "Lk", "value": "Lk"}  # the axis of the positions
FACTOR = (
    "The model's numbers are these times one factor, the same in all places looked at: a scale of the model's, or a "
    "norm of vectors that are equally long."
)


class Places(NamedTuple):
    """The sequences, heads and positions that are explained. A key head is listed for each query head that uses it."""

    batches: list[int]
    heads: list[int]
    positions: list[int]


def taken(tensor: Tensor, dim: int, places: list[int]) -> Tensor:
    """The tensor at these places along a dimension; a view where the places follow each other."""
    first = places[0] if places else 0
    if places == list(range(first, first + len(places))):
        return tensor.narrow(dim, first, len(places))
    return tensor.index_select(dim, torch.tensor(places, device=tensor.device))


class Turn(NamedTuple):
    """A rotation of the first `dim` entries, given the cosine and the sine of each entry's angle, (B, L, E)."""

    cos: Tensor
    sin: Tensor
    dim: int
    interleaved: bool

    def steps(self, name: str, before: Step, result: str, places: Places) -> list[Step]:
        axes = ("B", "H", before.axes[-2], "E")
        found = []
        for what, word, each in (("cos", "cosine", self.cos), ("sin", "sine", self.sin)):
            batches = places.batches if each.shape[0] > 1 else [0]
            rows = taken(taken(each, 0, batches), 1, places.positions).unsqueeze(1)
            why = f"The {word} of each entry's angle, made of the position by the model. Others have the angle 0."
            found.append(Step(f"{name}_{what}", why, rows.to(before.value.dtype), axes))
        partners = partner_step(name, before, self.dim, self.interleaved)
        return [*found, partners, turned_step(result, before, partners, *found)]


class Chain(NamedTuple):
    """A linear layer, whose `rows` (H, E) make the heads; then perhaps a norm, a rotation and a factor.

    `turned_first`: the norm follows the rotation. `others`: layers that give the same numbers in the same way.
    """

    ran: Ran
    rows: Tensor
    norm: tuple[str, Norm, bool] | None = None  # its name, the norm, and whether it spans all heads together
    turn: Turn | None = None
    factor: float = 1.0
    turned_first: bool = False
    others: tuple[str, ...] = ()

    @property
    def layer(self) -> Linear:
        assert isinstance(self.ran.layer, Linear)
        return self.ran.layer

    def steps(self, name: str, source: Step, places: Places) -> list[Step]:
        """From the step `source`, (B, L, in), which holds these places, to the step `name`."""
        norm, together = (self.norm[1], self.norm[2]) if self.norm else (None, False)
        heads = list(range(len(self.rows))) if together else list(dict.fromkeys(places.heads))
        layer = self.layer.rows(self.rows[heads].flatten()).to(source.value)
        why = (
            f"The module's layer {self.ran.name} makes {layer.weight.shape[0]} numbers of each vector of its input: "
            f"{self.rows.shape[1]} for each head shown."
        )
        flat = f"unnormed_{name}" if together else f"flat_{name}"
        if self.others:
            same = "Its layer" if len(self.others) == 1 else "Each of its layers"
            why += f" {same} {', '.join(self.others)} would give the same numbers, so it may be that layer."
        steps = projection_steps(layer, source, name, flat, why)
        if norm is not None and together:
            steps += norm_steps(norm, steps[-1], name, f"flat_{name}")
        norm = None if together else norm
        stages = [stage for stage, there in (("unnormed", norm), ("unturned", self.turn)) if there is not None]
        stages = stages[::-1] if self.turned_first else stages
        stages += ["unscaled"] if self.factor != 1.0 else []
        results = [*(f"{stage}_{name}" for stage in stages), name]
        steps.append(split(steps[-1], len(heads), [heads.index(head) for head in places.heads], results[0]))
        for stage, result in zip(stages, results[1:], strict=True):
            if stage == "unnormed" and norm is not None:
                steps += norm_steps(norm, steps[-1], name, result)
            elif stage == "unturned" and self.turn is not None:
                steps += self.turn.steps(name, steps[-1], result, places)
            else:
                steps.append(made(result, FACTOR, self.factor * steps[-1]))
        return steps

    def doubt(self, source: Step, places: Places) -> Tensor:
        """The `doubt` of the layer's sums in these places, (B, H, L, 1)."""
        layer = self.layer.rows(self.rows[places.heads].flatten()).to(source.value)
        return doubt(layer, source.value, len(places.heads)).transpose(1, 2)


def doubt(layer: Linear, x: Tensor, heads: int) -> Tensor:
    """How much larger the terms of the layer's sums are than the sums, for each head's vector, (B, L, H, 1).

    Rounding errors grow by this factor.
    """
    squares, sums = x.square() @ layer.weight.square().T, x @ layer.weight.T
    if layer.bias is not None:
        squares, sums = squares + layer.bias.square(), sums + layer.bias
    terms, sizes = (t.abs().unflatten(-1, (heads, -1)).amax(-1, keepdim=True) for t in (squares.sqrt(), sums))  # type: ignore[no-untyped-call]
    ratio: Tensor = terms / sizes
    return ratio.nan_to_num(0.0, posinf=0.0)


def turns(given: tuple[Tensor, Tensor] | None, batch: int, length: int, width: int) -> Iterator[Turn]:
    """The rotations that cosines and sines (B, L, R) may stand for.

    Pairs are halves or neighbours, each number is for an entry or for a pair, and all entries turn or only the first.
    Where there are fewer positions than vectors, the last vectors turn (DINOv3).
    """
    if given is None or not all(t.ndim in (2, 3) and t.is_floating_point() for t in given):
        return
    cos, sin = (t if t.ndim == 3 else t.unsqueeze(0) for t in given)
    size = cos.shape[-1]
    if cos.shape != sin.shape or cos.shape[0] not in (1, batch) or not 0 < cos.shape[1] <= length:
        return

    def turn(dim: int, interleaved: bool, entries: Tensor) -> Turn:
        still = [0, width - dim, length - cos.shape[1], 0]
        pad = torch.nn.functional.pad
        return Turn(pad(cos[..., entries], still, value=1.0), pad(sin[..., entries], still), dim, interleaved)

    each = torch.arange(size, device="cpu")
    if size <= width and size % 2 == 0:
        yield turn(size, False, each)
        yield turn(size, True, each)
        yield turn(size, True, each[: size // 2].repeat_interleave(2))
    if 2 * size <= width:
        yield turn(2 * size, False, each.repeat(2))
        yield turn(2 * size, True, each.repeat_interleave(2))
