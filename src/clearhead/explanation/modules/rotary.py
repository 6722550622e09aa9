"""The rotation of queries and keys by their positions."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.base.expressions import call, cat, short, side_by_side
from clearhead.base.steps import Operand, Step, made
from clearhead.nn.rotary_embedding import RotaryEmbedding

WHY = (
    "Each pair is turned by its angle. So the product of a query and a key depends on the difference of their "
    "positions alone."
)


def rotary_steps(rotary: RotaryEmbedding, name: str, before: Step, positions: Tensor) -> list[Step]:
    """From the step `before`, (B, H, L, E), at these positions, (L,) or (B, 1, L), to the step `name`.

    Each pair of entries (a, b) becomes (a cos θ − b sin θ, b cos θ + a sin θ): each entry times its cosine, plus its
    partner, −b or a, times its sine.
    """
    dim, length, still = rotary.dim, before.axes[-2], before.value.shape[-1] - rotary.dim
    lead = ("B", "H") if positions.ndim > 1 else ()
    places = Step(f"{name}_positions", f"The position of each {name} in its sequence.", positions, (*lead, length))
    which = "entries 2n and 2n + 1" if rotary.interleaved else f"entries n and n + {dim // 2}"
    rest = f" The last {still} entries do not turn: their angle is 0." if still else ""
    why = f"Pair n is {which}. Its angle grows by its speed from one position to the next.{rest}"
    pairs = speeds(rotary.base, dim, before.value.device)
    each = padded(pairs.repeat_interleave(2) if rotary.interleaved else pairs.repeat(2), still)
    of_entries = made(f"{name}_speeds", why, each, ("E",))
    why = "The angle of each entry, in radians: a full turn is 2π."
    turns = (places.double().unsqueeze(-1) * of_entries).to(before.value.dtype)
    angles = made(f"{name}_angles", why, turns, (*lead, length, "E"))
    partners = partner_step(name, before, dim, rotary.interleaved)
    return [places, of_entries, angles, partners, turned_step(name, before, partners, angles.cos(), angles.sin())]


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
