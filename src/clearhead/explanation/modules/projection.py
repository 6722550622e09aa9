"""Linear layers: an input projected and split into heads, and the heads joined and projected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.base.expressions import call, cat
from clearhead.base.steps import Step, made
from clearhead.explanation.shown import Shown

ATTENDS = (
    "A head is an attention of its own over these shorter vectors: the axis of the heads comes before that of the "
    "positions (a transposition), so that each head has its own matrix products. No number changes."
)
JOINED = ("B", "Lq", "in")


class Linear(NamedTuple):
    """A linear layer: weight (out, in), bias (out,) or None."""

    weight: Tensor
    bias: Tensor | None

    def rows_of(self, heads: Sequence[int], width: int) -> Linear:
        """The rows that make these heads, each of this width."""
        kept = [row for head in heads for row in range(head * width, (head + 1) * width)]
        return self.rows(torch.tensor(kept, device="cpu"))

    def rows(self, rows: Tensor) -> Linear:
        """The layer that makes these numbers of its result, and no others."""
        return Linear(self.weight[rows], None if self.bias is None else self.bias[rows])

    def to(self, like: Tensor) -> Linear:
        """A copy in another dtype."""
        return Linear(self.weight.to(like).clone(), None if self.bias is None else self.bias.to(like).clone())


def projection_steps(layer: Linear, source: Step, name: str, result: str, why: str) -> list[Step]:
    """`result` = source · weightᵀ + bias, after the weight, `W_name`, and the bias, `b_name`."""
    weight = Step(f"W_{name}", "Learnt: row n makes number n of the result.", layer.weight, ("out", "in"))
    value, steps = source @ weight.T, [weight]
    if layer.bias is not None:
        steps.append(Step(f"b_{name}", "Learnt: added to each result.", layer.bias, ("out",)))
        value = value + steps[-1]
    return [*steps, made(result, why, value, (*source.axes[:-1], "out"))]


def split(source: Step, heads: int, places: list[int], result: str) -> Step:
    """(B, L, heads · width) as (B, len(places), L, width): entry n is head `places[n]`."""
    width = source.value.shape[-1] // heads
    axis = source.axes[-2]
    why = f"Each vector of {source.value.shape[-1]} is cut into {heads} of {width}, one for each head h."
    if heads == 1:
        why = f"These {width} numbers are those of the head."
    why = f"{why} {ATTENDS}" if axis == "Lq" else "Cut into heads as the queries are."
    axes = ("B", "H", axis, "Ev" if result == "value" else "E")
    value = call("unflatten", source, -1, (heads, width), axes=("B", axis, "H", axes[-1])).transpose(-3, -2)
    if places != list(range(heads)):
        why += " Query heads that share a key head each get its rows."
        value = value[..., places, :, :]
    return made(result, why, value, axes)


def joined_steps(layer: Linear, output: Step, heads: Tensor, shown: Shown) -> list[Step]:
    """From the step "output" to the step "result". `heads`: the outputs of all heads, (B, H, Lq, Ev)."""
    if len(shown.heads) == heads.shape[1]:
        why = "The vectors of the heads side by side, one vector for each position again. No number changes."
        steps = [made("joined", why, output.transpose(-3, -2).flatten(-2), JOINED)]
    else:
        steps = _beside_others(output, heads, shown)
    why = "The last linear layer mixes the heads: each number of the result is a sum over the numbers of all heads."
    return steps + projection_steps(layer.to(output.value), steps[-1], "output", "result", why)


def _beside_others(output: Step, heads: Tensor, shown: Shown) -> list[Step]:
    """The outputs of all heads side by side: computed for the explained heads, given for the others."""
    chosen = heads[list(shown.batches)][:, :, list(shown.queries)].detach().to(output.value.dtype)
    others = chosen.index_fill(1, torch.tensor(shown.heads, device=chosen.device), 0.0)
    flat, width = others.transpose(-3, -2).flatten(-2), heads.shape[-1]
    where = ", ".join(f"head {h} in entries {h * width} to {(h + 1) * width - 1}" for h in shown.heads)
    given = f"The outputs of the other heads side by side, computed alike, with room for {where}."
    rest = Step("other_heads", given, flat, JOINED)
    pieces = [
        output[..., shown.heads.index(h), :, :] if h in shown.heads else rest[..., slice(h * width, (h + 1) * width)]
        for h in range(heads.shape[1])
    ]
    return [rest, made("joined", "The vectors of all heads side by side. No number changes.", cat(*pieces), JOINED)]
