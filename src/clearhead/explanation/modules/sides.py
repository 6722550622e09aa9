"""The steps of a side of multi-head attention, from a head's projected vectors to its queries or keys; and its gate."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor, nn

from clearhead.base.arrays import accumulated
from clearhead.base.symbolic.steps import Step, made
from clearhead.base.torch_state.torch_private import has_hooks
from clearhead.explanation.modules.projection import (
    Linear,
    Norm,
    norm_steps,
    projection_steps,
    rotary_steps,
    split,
)
from clearhead.explanation.shown import Shown
from clearhead.nn._options import apply_norm, apply_rotary, find_norm_dtype, places_by_row, split_factors
from clearhead.nn.multi_head_attention import MultiHeadAttention
from clearhead.nn.rotary_embedding import RotaryEmbedding


class Side(NamedTuple):
    """What is known of the queries, or of the keys, of a call.

    `heads`: which heads of this side are shown, and `rows` which positions. `unnormed`: all vectors of all heads, as
    projected, (B, H, L, E). `positions`: where they stand, (L,) or (B, L); `past`: from where, if there are none.
    """

    name: str
    heads: list[int]
    rows: list[int]
    batches: list[int]
    unnormed: Tensor
    past: int | Tensor
    positions: Tensor | None


def stages(module: MultiHeadAttention, name: str) -> list[str]:
    """What the module does to the projected queries or keys, in order: the names of its inputs, and at last `name`."""
    norm = module.query_norm if name == "query" else module.key_norm
    done = {"unnormed": norm is not None, "unturned": module.rotary is not None}
    factor = split_factors(module.score, module.scale, module.temperature, 1)[1]
    done["unscaled"] = name == "query" and factor is not None
    return [*(f"{stage}_{name}" for stage, there in done.items() if there), name]


def _chosen(whole: Tensor, side: Side) -> Tensor:
    """What is shown of vectors of all heads (B, H, L, E)."""
    batches = side.batches if whole.shape[0] > 1 else [0]
    return whole[batches][:, side.heads][:, :, side.rows].detach()


def _norm(module: MultiHeadAttention, side: Side, before: Step, result: str) -> list[Step]:
    argument = f"{side.name}_norm"
    norm = getattr(module, argument)
    known = type(norm) in (nn.RMSNorm, nn.LayerNorm) and not has_hooks(norm)
    if known:
        dtype = accumulated(find_norm_dtype(norm, side.unnormed))
        eps = torch.finfo(dtype).eps if norm.eps is None else norm.eps
        weight, bias = (getattr(norm, part, None) for part in ("weight", "bias"))
        form = Norm(weight, bias, eps, isinstance(norm, nn.LayerNorm)).to(before.value)
        return norm_steps(form, before, side.name, result)
    why = f"The module's {argument}, a {type(norm).__name__}, which shows no steps of its own."
    value = _chosen(apply_norm(argument, norm, side.unnormed), side).to(before.value.dtype)
    return [Step(result, why, value, before.axes, formula=f"{result} = {argument}({before.name})")]


def _turn(module: MultiHeadAttention, side: Side, before: Step, result: str) -> list[Step]:
    rotary = module.rotary
    places = places_by_row(side.unnormed, side.past, side.positions)  # (B, L)
    chosen = places[side.batches if places.shape[0] > 1 else [0]][:, side.rows]
    alike = bool((chosen == chosen[:1]).all())
    if isinstance(rotary, RotaryEmbedding):
        shown = chosen[0] if alike else chosen[:, None]
        return rotary_steps(rotary, side.name, before, shown, places.flatten(), result)
    why = f"Turned by the module's rotary, a {type(rotary).__name__}, which shows no steps of its own."
    whole = apply_norm(f"{side.name}_norm", getattr(module, f"{side.name}_norm"), side.unnormed)
    value = _chosen(apply_rotary(rotary, whole, side.past, side.positions), side).to(before.value.dtype)
    return [Step(result, why, value, before.axes, formula=f"{result} = rotary({before.name})")]


def _scale(module: MultiHeadAttention, side: Side, before: Step, result: str) -> list[Step]:
    _, factor = split_factors(module.score, module.scale, module.temperature, before.value.shape[-1])
    assert factor is not None
    numbers = (factor[side.heads] if len(factor) > 1 else factor)[None].to(before.value)
    why = "The scale of each head, over its temperature. A query times a number has scores times this number."
    of_heads = Step("scale", why, numbers, ("B", "H", "1", "1"))
    return [of_heads, made(result, "Each query times the scale of its head.", before * of_heads, before.axes)]


STAGES = {"unnormed": _norm, "unturned": _turn, "unscaled": _scale}


def side_steps(module: MultiHeadAttention, side: Side, before: Step) -> list[Step]:
    """The steps from `before`, whose name is the first of the `stages`, to the last."""
    steps = [before]
    for name, result in itertools.pairwise(stages(module, side.name)):
        steps += STAGES[name.removesuffix(f"_{side.name}")](module, side, steps[-1], result)
    return steps[1:]


def gate_steps(module: MultiHeadAttention, source: Step, output: Step, shown: Shown) -> list[Step]:
    """From the step "output" to the step "gated": the heads' outputs times factors that are made of the queries."""
    layer = module.W_g
    assert layer is not None
    width = output.value.shape[-1] if module.gate == "elementwise" else 1
    rows = Linear(layer.weight, layer.bias).rows_of(shown.heads, width).to(source.value)
    why = f"A linear layer makes {width} numbers for each head of each query's input."
    steps = projection_steps(rows, source.but(axes=("B", "Lq", "in")), "gate", "flat_gate", why)
    steps.append(split(steps[-1], len(shown.heads), list(range(len(shown.heads))), "unbounded_gate"))
    why = "The sigmoid 1 / (1 + exp(-x)), written as (1 + tanh(x / 2)) / 2: from 0 (shut) to 1 (open)."
    steps.append(made("gate", why, ((steps[-1] / 2).tanh() + 1) / 2))
    why = "The gate multiplies the output of each head: it may take away what the head has found."
    return [*steps, made("gated", why, output * steps[-1], output.axes)]
