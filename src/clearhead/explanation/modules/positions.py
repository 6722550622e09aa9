"""Encodings of positions: each vector gets another one added, or is rotated, by its position."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.errors import ClearheadError
from clearhead.base.output.text import brief
from clearhead.base.shapes import Sizes
from clearhead.base.symbolic.expressions import side_by_side
from clearhead.base.symbolic.steps import Step, made
from clearhead.explanation.explanation import Explanation, Part
from clearhead.explanation.modules.projection import rotary_steps, speeds
from clearhead.explanation.shown import QUERIES, Asked, Shown
from clearhead.nn._positions import every_position
from clearhead.nn.learned_positional_encoding import LearnedPositionalEncoding
from clearhead.nn.rotary_embedding import RotaryEmbedding
from clearhead.nn.sinusoidal_positional_encoding import SinusoidalPositionalEncoding

Positional = SinusoidalPositionalEncoding | LearnedPositionalEncoding | RotaryEmbedding
AXES = ("B", "H", "L", "E")


def explain_positions(module: Positional, given: dict[str, Any], asked: Asked) -> Explanation:
    """The steps of a module that encodes positions, called with `given`.

    `asked.at` names the positions, a number or a slice of them.
    """
    x, offset = given["x"], given.get("offset", 0)
    module(x, offset, positions=given.get("positions"))  # raises the module's own errors
    at, length = asked.at, range(x.shape[-2])
    places = length[:QUERIES] if at is None else _places(at, length)
    if 0 in x.shape[:-1]:
        raise ClearheadError(f"there is nothing to explain: x is {tuple(x.shape)}, without a position.")
    four = x.reshape(-1, *x.shape[-3:]) if x.ndim > 3 else x.reshape(-1, 1, *x.shape[-2:])
    some = at is None and len(length) > QUERIES
    left_out = (f"{len(length)} positions: the first {QUERIES} are shown",) if some else ()
    batch, heads = four.shape[:2]
    words, _ = asked.words(len(length), len(length), tuple(range(batch)))
    sizes = Sizes(batch, heads, len(length), len(length), leading=x.shape[:-2])
    absent = AXES[x.ndim - 2 : 2] if x.ndim < 3 else ("H",) if x.ndim == 3 else ()
    pair = (0, 0, min(1, len(places) - 1), 0)
    shown = Shown(sizes, tuple(range(batch)), tuple(range(heads)), tuple(places), (), pair, absent, left_out, (), words)
    why = "One vector for each position p, such as that of a word. The vector alone does not say where it stands."
    source = Step("x", why, four[:, :, list(places)].to(accumulated(x.dtype)), AXES)
    every = every_position(x, offset, given.get("positions"), type(module).__name__)
    if every.ndim > 1:  # of each sequence, (B, 1, L)
        every = every.repeat_interleave(batch // len(every), 0)[:, None]
    positions = every[..., list(places)]
    if isinstance(module, RotaryEmbedding):
        steps = rotary_steps(module, "result", source, positions, every, "result")
    else:
        axes = ("B", "H", "L") if positions.ndim > 1 else ("L",)
        if isinstance(module, SinusoidalPositionalEncoding):
            steps = _sines(module.embed_dim, source, positions, axes)
        else:
            why = "Learnt: one vector for each position; the rows are those of the positions here."
            steps = [Step("encoding", why, module.P[positions].to(source.value.dtype), (*axes, "E"))]
        why = "The sum depends on the position too, so that attention can use the order of the vectors."
        steps.append(made("result", why, source + steps[-1], AXES))
    title = f"{type(module).__name__}({module.extra_repr()}), step by step"
    return Explanation(title, (Part("Inputs", (source,)), Part("Positions", tuple(steps))), shown)


def _places(at: Any, every: range) -> range:
    try:
        found = every[at] if isinstance(at, slice) else every[operator.index(at) :][:1]
    except (TypeError, ValueError):
        found = range(0)
    if not found or (not isinstance(at, slice) and not -len(every) <= at < len(every)):
        raise ClearheadError(
            f"at is {brief(at)}, and x has {len(every)} positions; expected the number of one, or a slice of them."
        )
    return found


def _sines(width: int, source: Step, given: Tensor, axes: tuple[str, ...]) -> list[Step]:
    positions = Step("positions", "The position of each vector.", given, axes)
    why = (
        "Numbers 2n and 2n + 1 of the encoding are pair n. From one position to the next its angle grows by its speed."
    )
    fast = made("speeds", why, speeds(10000.0, width, given.device), ("pair",))
    why = "The angle of each pair, in radians: 2π is a full turn."
    angles = made("angles", why, positions.double().unsqueeze(-1) * fast, (*axes, "pair"))
    why = "The sine and the cosine of each angle, side by side. Positions near each other get similar vectors."
    both = side_by_side(angles.sin(), angles.cos())[..., :width].to(source.value.dtype)
    return [positions, fast, angles, made("encoding", why, both, (*axes, "E"))]
