"""Attention over blocks of keys, merged: how fused kernels never hold a whole row of scores."""

from __future__ import annotations

from torch import Tensor

from clearhead.base.shapes import Sizes
from clearhead.base.steps import Step, made
from clearhead.explanation.explanation import Explanation, Part
from clearhead.explanation.inputs import letters
from clearhead.explanation.shown import Shown
from clearhead.scores.base import SCORES

ABOUT = (
    "Attention is computed over two blocks of keys, each by itself, and the two outputs are merged. So no whole row of "
    "scores is needed."
)
ROW = ("B", "H", "Lq", "1")


def explain_online_softmax(scores: Tensor, value: Tensor, first: int) -> Explanation:
    """Attention of scores (Lq, Lk) over value (Lk, Ev): the first keys in one block, the rest in another, then merged.

    Formula: docs/maths/softmax.md. Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
    """
    queries, keys = scores.shape
    sizes = Sizes(1, 1, queries, keys, leading=())
    places = tuple(range(queries)), tuple(range(keys))
    shown = Shown(sizes, (0,), (0,), *places, (0, 0, 0, 0), ("B", "H"), (), places[1])
    s = Step("scores", "One number for each query and key.", scores[None, None], SCORES)
    v = Step("value", "One vector for each key.", value[None, None], ("B", "H", "Lk", "Ev"))
    one, two = _block("first", s, v, slice(0, first)), _block("second", s, v, slice(first, keys))
    parts = [
        Part("Inputs", (s, v), f"{ABOUT}\n{letters(())}"),
        Part(f"The first block: keys 0 to {first - 1}", tuple(one)),
        Part(f"The second block: keys {first} to {keys - 1}", tuple(two)),
        Part("Merged: exactly the softmax over all keys", tuple(_merged(one, two, s, v))),
    ]
    return Explanation("Online softmax, step by step", tuple(parts), shown)


def _block(name: str, scores: Step, value: Step, keys: slice) -> list[Step]:
    """Attention over some of the keys alone."""
    part, rows = scores[..., keys], value[..., keys, :]
    why = f"The largest score of the keys {keys.start} to {keys.stop - 1}."
    maximum = made(f"{name}_maximum", why, part.amax(-1, keepdim=True), ROW)
    why = "The columns are the keys of this block. Nothing of the other block is needed."
    numerator = made(f"{name}_numerator", why, (part - maximum).exp(), ("B", "H", "Lq", "n"))
    total = made(f"{name}_total", "The sum of this block.", numerator.sum(-1, keepdim=True), ROW)
    output = made(f"{name}_output", "The output as if there were no other keys.", numerator / total @ rows)
    return [maximum, numerator, total, output]


def _merged(one: list[Step], two: list[Step], scores: Step, value: Step) -> list[Step]:
    maximum = made("maximum", "The largest score of all keys.", one[0].maximum(two[0]), ROW)
    shares = []
    for name, (own, _, total, _) in (("first", one), ("second", two)):
        why = (
            f"The block's total as if the larger maximum had been subtracted: exp(score - {name}_maximum) · "
            f"exp({name}_maximum - maximum) = exp(score - maximum)."
        )
        shares.append(made(f"{name}_share", why, total * (own - maximum).exp(), ROW))
    first, second = shares
    why = "Each block's output, times its share of the sum of both."
    output = made("output", why, (first * one[-1] + second * two[-1]) / (first + second), one[-1].axes)
    why = "A check: the same output from all keys at once."
    return [maximum, *shares, output, made("at_once", why, scores.softmax(-1) @ value)]
