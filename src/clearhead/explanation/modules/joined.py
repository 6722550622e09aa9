"""The heads' outputs side by side, and the last projection, which mixes them."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.base.expressions import cat
from clearhead.base.steps import Step, made
from clearhead.explanation.modules.projection import Linear, projection_steps
from clearhead.explanation.shown import Shown

AXES = ("B", "Lq", "in")


def joined_steps(layer: Linear, output: Step, heads: Tensor, shown: Shown) -> list[Step]:
    """From the step "output" to the step "result". `heads`: the outputs of all heads, (B, H, Lq, Ev)."""
    if len(shown.heads) == heads.shape[1]:
        why = "The vectors of the heads side by side, one vector for each position again. No number changes."
        steps = [made("joined", why, output.transpose(-3, -2).flatten(-2), AXES)]
    else:
        steps = _beside_others(output, heads, shown)
    why = "The last linear layer mixes the heads: each number of the result is a sum over the numbers of all heads."
    return steps + projection_steps(layer.to(output.value), steps[-1], "output", "result", why)


def _beside_others(output: Step, heads: Tensor, shown: Shown) -> list[Step]:
    """The outputs of the heads that are explained, between those of the others, which are given."""
    chosen = heads[list(shown.batches)][:, :, list(shown.queries)].detach().to(output.value.dtype)
    others = chosen.index_fill(1, torch.tensor(shown.heads, device=chosen.device), 0.0)
    flat, width = others.transpose(-3, -2).flatten(-2), heads.shape[-1]
    where = ", ".join(f"head {h} in entries {h * width} to {(h + 1) * width - 1}" for h in shown.heads)
    given = f"The outputs of the other heads side by side, computed alike, with room for {where}."
    rest = Step("other_heads", given, flat, AXES)
    pieces = [
        output[..., shown.heads.index(h), :, :] if h in shown.heads else rest[..., slice(h * width, (h + 1) * width)]
        for h in range(heads.shape[1])
    ]
    return [rest, made("joined", "The vectors of all heads side by side. No number changes.", cat(*pieces), AXES)]
