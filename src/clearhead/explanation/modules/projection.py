"""Linear layers: an input projected and split into heads, and the heads joined and projected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.base.output.text import with_outline
from clearhead.base.symbolic.expressions import call, cat, short, side_by_side
from clearhead.base.symbolic.steps import Operand, Step, made
from clearhead.explanation.shown import Shown
from clearhead.nn.rotary_embedding import RotaryEmbedding


@with_outline
class Norm(NamedTuple):
    """A layer norm of each vector, or an RMS norm where `centred` is False. weight, bias: (width,)."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool

    def to(self, like: Tensor) -> Norm:
        """The norm with its parameters in the dtype of `like`."""
        weight, bias = (None if t is None else t.to(like) for t in (self.weight, self.bias))
        return self._replace(weight=weight, bias=bias)


def norm_steps(norm: Norm, before: Step, name: str, result: str) -> list[Step]:
    """The steps to `result`: each vector of `before`, without its mean where the norm is centred, divided by its size,
    then times the weight and plus the bias."""
    x, steps, width = before, [], before.value.shape[-1]
    if norm.centred:
        mean = before.sum(-1, keepdim=True) / width
        x = made(f"centred_{name}", "Each vector without its mean.", before - mean)
        steps.append(x)
    root = (x.square().sum(-1, keepdim=True) / width + norm.eps).sqrt()
    size = made(f"size_{name}", "The size of each vector's numbers: √ of their mean square.", root)
    steps.append(size)
    value = x / size
    if norm.weight is not None:
        weight = Step(f"norm_{name}", "The factor of each number, learnt.", norm.weight, ("E",))
        steps.append(weight)
        value = value * weight
    if norm.bias is not None:
        bias = Step(f"shift_{name}", "Learnt: added to each number.", norm.bias, ("E",))
        steps.append(bias)
        value = value + bias
    why = f"The module's norm of each {name}: no vector is large because its input is."
    return [*steps, made(result, why, value, before.axes)]


WHY = (
    "Each pair is turned by its angle. So the product of a query and a key depends on the difference of their "
    "positions alone."
)


def rotary_steps(
    rotary: RotaryEmbedding, name: str, before: Step, positions: Tensor, every: Tensor, result: str
) -> list[Step]:
    """From the step `before`, (B, H, L, E), at these positions, (L,) or (B, 1, L), to the step `result`.

    `every`: all positions of the call.

    Each pair of entries (a, b) becomes (a cos θ − b sin θ, b cos θ + a sin θ): each entry times its cosine, plus its
    partner, −b or a, times its sine.
    """
    dim, length, still = rotary.dim, before.axes[-2], before.value.shape[-1] - rotary.dim
    lead = ("B", "H") if positions.ndim > 1 else ()
    places = Step(f"{name}_positions", f"The position of each {name} in its sequence.", positions, (*lead, length))
    which = "entries 2n and 2n + 1" if rotary.interleaved else f"entries n and n + {dim // 2}"
    rest = f" The last {still} entries do not turn: their angle is 0." if still else ""
    why = f"Pair n is {which}. Its angle grows by its speed from one position to the next.{rest}"
    pairs: Operand = speeds(rotary.base, dim, before.value.device)
    given = []
    if rotary.scaling is not None:
        slowed = rotary.speeds(every.flatten().double())
        why_slow = f"The speed of each pair, by the scaling {rotary.scaling}."
        given = [Step(f"{name}_pair_speeds", why_slow, slowed, ("pair",))]
        pairs = given[0]
    each = padded(pairs.repeat_interleave(2) if rotary.interleaved else pairs.repeat(2), still)
    of_entries = made(f"{name}_speeds", why, each, ("E",))
    why = "The angle of each entry, in radians: a full turn is 2π."
    turns = (places.double().unsqueeze(-1) * of_entries).to(before.value.dtype)
    angles = made(f"{name}_angles", why, turns, (*lead, length, "E"))
    partners = partner_step(name, before, dim, rotary.interleaved)
    cos, sin, sizes = angles.cos(), angles.sin(), []
    if rotary.scaling is not None and rotary.scaling.magnitude != 1:
        factor = before.value.new_ones(dim + still)
        factor[:dim] = rotary.scaling.magnitude
        sizes = [Step(f"{name}_sizes", "The scaling makes the entries that turn larger, by this.", factor, ("E",))]
        cos, sin = cos * sizes[0], sin * sizes[0]
    turned = turned_step(result, before, partners, cos, sin)
    return [places, *given, of_entries, angles, partners, *sizes, turned]


def speeds(base: float, width: int, device: torch.device) -> Operand:
    """base^(−2n / width) for each pair n, in float64."""
    return short(base) ** -(call("arange", 0, width, 2, device=device).double() / width)


def padded(x: Operand, still: int) -> Operand:
    """The vector with `still` zeros behind it, for the entries that do not turn."""
    return call("pad", x, (0, still)) if still else x


def partner_step(name: str, before: Step, dim: int, interleaved: bool) -> Step:
    """For each of the first `dim` entries the other entry of its pair (a, b), with its sign in a rotation: −b or a.

    Pairs are neighbours where they are interleaved, else an entry of the first half with one of the second.
    """
    if interleaved:
        value = side_by_side(-before[..., 1:dim:2], before[..., 0:dim:2])
    else:
        value = cat(-before[..., dim // 2 : dim], before[..., : dim // 2])
    why = "The other entry of the same pair: a rotation of a pair (a, b) mixes its two entries."
    return made(f"{name}_partners", why, padded(value, before.value.shape[-1] - dim), before.axes)


def turned_step(name: str, before: Step, partners: Step, cos: Operand, sin: Operand) -> Step:
    """Each pair turned by an angle whose cosine and sine are given for each entry."""
    return made(name, WHY, before * cos + partners * sin, before.axes)


ATTENDS = (
    "A head is an attention of its own over these shorter vectors: the axis of the heads comes before that of the "
    "positions (a transposition), so that each head has its own matrix products. No number changes."
)
JOINED = ("B", "Lq", "in")


@with_outline
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
