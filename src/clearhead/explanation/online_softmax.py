"""Attention over blocks of keys, merged: how fused kernels never hold a whole row of scores."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.base.shapes import Sizes
from clearhead.base.steps import Cell, Step, number, signed
from clearhead.explanation.explanation import Explanation, Part
from clearhead.explanation.inputs import letters
from clearhead.explanation.shown import Shown
from clearhead.problem.partial import Partial
from clearhead.scores.base import SCORES

ABOUT = "The keys are taken in two blocks, each by itself, and the two outputs are merged: no row is needed as a whole."
ROW, OUT = ("B", "H", "Lq", "1"), ("B", "H", "Lq", "Ev")


def explain_online_softmax(scores: Tensor, value: Tensor, first: int) -> Explanation:
    """Scores (Lq, Lk) and value (Lk, Ev), the first keys in one block, the rest in another, then merged.

    Formula: docs/maths/softmax.md. Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
    """
    queries, keys = scores.shape
    sizes = Sizes(1, 1, queries, keys, leading=())
    places = tuple(range(queries)), tuple(range(keys))
    shown = Shown(sizes, (0,), (0,), *places, (0, 0, 0, 0), ("B", "H"), (), places[1])
    s, v = scores[None, None], value[None, None]
    inputs = [
        Step("scores", "", "One number for each query and key.", s, SCORES),
        Step("value", "", "One vector for each key.", v, ("B", "H", "Lk", "Ev")),
    ]
    one, first_steps = _block("first", s, v, slice(0, first))
    two, second_steps = _block("second", s, v, slice(first, keys))
    parts = [
        Part("Inputs", tuple(inputs), f"{ABOUT}\n{letters(())}"),
        Part(f"The first block: keys 0 to {first - 1}", tuple(first_steps)),
        Part(f"The second block: keys {first} to {keys - 1}", tuple(second_steps)),
        Part("Merged: exactly the softmax over all keys", tuple(_merged(one, two, s, v))),
    ]
    return Explanation("Online softmax, step by step", tuple(parts), shown)


def _block(name: str, scores: Tensor, value: Tensor, keys: slice) -> tuple[Partial, list[Step]]:
    """Attention over some of the keys alone."""
    part, rows = scores[..., keys], value[..., keys, :]
    maximum = part.amax(-1, keepdim=True)
    above = (part - maximum).exp()
    total = above.sum(-1, keepdim=True)
    output = above / total @ rows
    of, where = f"scores[..., {keys.start}:{keys.stop}]", f"keys {keys.start} to {keys.stop - 1}"
    steps = [
        Step(
            f"{name}_maximum", f"{name}_maximum[i] = max_j scores[i, j] over {where}", "The largest score here.",
            maximum, ROW, f"{name}_maximum = {of}.amax(-1, keepdim=True)",
        ),
        Step(
            f"{name}_numerator", f"{name}_numerator[i, j] = exp(scores[i, j] - {name}_maximum[i])",
            "The columns are the keys of this block. Nothing of the other block is needed.",
            above, ("B", "H", "Lq", "n"),
            f"{name}_numerator = torch.exp({of} - {name}_maximum)",
            lambda at: f"exp({number(part[at])} - {signed(maximum[(*at[:3], 0)])})",
        ),
        Step(
            f"{name}_total", f"{name}_total[i] = Σ_j {name}_numerator[i, j]", "The sum of this block.", total, ROW,
            f"{name}_total = {name}_numerator.sum(-1, keepdim=True)",
            lambda at: " + ".join(number(x) for x in above[at[:3]]),
        ),
        Step(
            f"{name}_output", f"{name}_output[i, e] = Σ_j {name}_numerator[i, j] / {name}_total[i] · value[j, e]",
            "The output as if there were no other keys.", output, OUT,
            f"{name}_output = {name}_numerator / {name}_total @ value[..., {keys.start}:{keys.stop}, :]",
        ),
    ]  # fmt: skip
    return Partial(output, maximum[..., 0], total[..., 0].log()), steps


def _merged(one: Partial, two: Partial, scores: Tensor, value: Tensor) -> list[Step]:
    both = one.merge(two)
    maximum = _row(both.maximum)
    steps = [
        Step(
            "maximum", "maximum[i] = the larger of first_maximum[i] and second_maximum[i]",
            "The largest score of all keys.", maximum, ROW, "maximum = torch.maximum(first_maximum, second_maximum)",
        ),
    ]  # fmt: skip
    for name, part in (("first", one), ("second", two)):
        why = (
            f"The block's total as if the larger maximum had been subtracted: exp(score - {name}_maximum) · "
            f"exp({name}_maximum - maximum) = exp(score - maximum)."
        )
        formula = f"{name}_share[i] = {name}_total[i] · exp({name}_maximum[i] - maximum[i])"
        share = _row(part.log_sum).exp() * (_row(part.maximum) - maximum).exp()
        code = f"{name}_share = {name}_total * torch.exp({name}_maximum - maximum)"
        steps.append(Step(f"{name}_share", formula, why, share, ROW, code, _scaled(part, maximum)))
    sums = "(first_share * first_output + second_share * second_output) / (first_share + second_share)"
    formula = "output[i, e] = (first_share[i] · first_output[i, e] + second_share[i] · second_output[i, e])"
    formula += " / (first_share[i] + second_share[i])"
    why = "Each block's output, times its share of the sum of both."
    whole = torch.softmax(scores, -1) @ value
    why_at_once, code = "A check: the same output from all keys at once.", "at_once = scores.softmax(-1) @ value"
    return [
        *steps,
        Step(
            "output",
            formula,
            why,
            both.output,
            OUT,
            f"output = {sums}",
        ),
        Step("at_once", "at_once[i, e] = Σ_j softmax(scores)[i, j] · value[j, e]", why_at_once, whole, OUT, code),
    ]


def _row(numbers: Tensor | None) -> Tensor:
    assert numbers is not None
    return numbers.unsqueeze(-1)


def _scaled(part: Partial, maximum: Tensor) -> Cell:
    own, log_sum = _row(part.maximum), _row(part.log_sum)
    return lambda at: f"{number(log_sum[at].exp())}·exp({number(own[at])} - {signed(maximum[at])})"
