"""The rotation of queries and keys by their positions."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.base.steps import INDEX, Step, number, signed
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
    x, dim, axes = before.value, rotary.dim, before.axes
    length, i, still = axes[-2], INDEX[axes[-2]], x.shape[-1] - rotary.dim
    halves = torch.arange(0, dim, 2, device=x.device).double() / dim
    speeds = rotary.base**-halves
    speeds = speeds.repeat_interleave(2) if rotary.interleaved else speeds.repeat(2)
    speeds = torch.nn.functional.pad(speeds, (0, still))
    angles = (positions.double().unsqueeze(-1) * speeds).to(x.dtype)
    partners = partner_step(name, before, dim, rotary.interleaved)
    partner, p, u = partners.value, f"{name}_positions", before.name
    pad = _padded(still)
    each = f"{rotary.base!r} ** -(torch.arange(0, {dim}, 2).double() / {dim})"
    which = "entries 2n and 2n + 1" if rotary.interleaved else f"entries n and n + {dim // 2}"
    rest = f" The last {still} entries do not turn: their angle is 0." if still else ""
    speed_code = pad.format(f"({each}).repeat_interleave(2)" if rotary.interleaved else f"({each}).repeat(2)")
    lead = ("B", "H") if positions.ndim > 1 else ()
    dtype = str(x.dtype)
    return [
        Step(p, "", f"The position of each {name} in its sequence.", positions, (*lead, length)),
        Step(
            f"{name}_speeds", f"{name}_speeds[n] = {rotary.base:g}^(-2n/{dim}), for each entry of pair n",
            f"Pair n is {which}. Its angle grows by its speed from one position to the next.{rest}", speeds, ("E",),
            f"{name}_speeds = {speed_code}",
        ),
        Step(
            f"{name}_angles", f"{name}_angles[{i}, d] = {p}[{i}] · {name}_speeds[d]",
            "The angle of each entry, in radians: a full turn is 2π.", angles, (*lead, length, "E"),
            f"{name}_angles = ({p}.double().unsqueeze(-1) * {name}_speeds).to({dtype})",
            lambda at: f"{int(positions[at[:-1]])}·{number(speeds[at[-1]])}",
        ),
        partners,
        Step(
            name,
            f"{name}[{i}, d] = {u}[{i}, d] · cos({name}_angles[{i}, d]) + "
            f"{name}_partners[{i}, d] · sin({name}_angles[{i}, d])",
            WHY, x * angles.cos() + partner * angles.sin(), axes,
            f"{name} = {u} * {name}_angles.cos() + {name}_partners * {name}_angles.sin()",
            lambda at: _mixed(x[at], partner[at], angles.expand(*x.shape)[at]),
        ),
    ]  # fmt: skip


def partner_step(name: str, before: Step, dim: int, interleaved: bool) -> Step:
    """The other entry of each pair (a, b), −b or a, with the sign that it has in a rotation; the first `dim` entries.

    Pairs are neighbours where they are interleaved, else the halves.
    """
    x, u, half = before.value, before.name, dim // 2
    still = x.shape[-1] - dim
    if interleaved:
        value = torch.stack([-x[..., 1:dim:2], x[..., 0:dim:2]], -1).flatten(-2)
        pairing = f"torch.stack([-{u}[..., 1:{dim}:2], {u}[..., 0:{dim}:2]], -1).flatten(-2)"
    else:
        value = torch.cat([-x[..., half:dim], x[..., :half]], -1)
        pairing = f"torch.cat([-{u}[..., {half}:{dim}], {u}[..., :{half}]], -1)"
    return Step(
        f"{name}_partners",
        f"{name}_partners[{INDEX[before.axes[-2]]}] = -b in the place of a, and a in the place of b, "
        "for each pair (a, b)",
        "The other entry of the same pair: a rotation of a pair (a, b) mixes its two entries.",
        torch.nn.functional.pad(value, (0, still)),
        before.axes,
        f"{name}_partners = {_padded(still).format(pairing)}",
    )


def turned_step(name: str, before: Step, partners: Step, cos: Step, sin: Step) -> Step:
    """Each pair turned by an angle whose cosine and sine are given for each entry."""
    x, partner, i = before.value, partners.value, INDEX[before.axes[-2]]
    u, p, c, s = before.name, partners.name, cos.name, sin.name
    cosines, sines = cos.value.expand(x.shape), sin.value.expand(x.shape)
    return Step(
        name,
        f"{name}[{i}, d] = {u}[{i}, d] · {c}[{i}, d] + {p}[{i}, d] · {s}[{i}, d]",
        WHY,
        x * cos.value + partner * sin.value,
        before.axes,
        f"{name} = {u} * {c} + {p} * {s}",
        lambda at: f"{signed(x[at])}·{signed(cosines[at])} + {signed(partner[at])}·{signed(sines[at])}",
    )


def _padded(still: int) -> str:
    """The code of entries that do not turn, beside others."""
    return f"torch.nn.functional.pad({{}}, (0, {still}))" if still else "{}"


def _mixed(entry: Tensor, partner: Tensor, angle: Tensor) -> str:
    theta = number(angle)
    return f"{signed(entry)}·cos({theta}) + {signed(partner)}·sin({theta})"
