"""The arguments of `attention`, as `explain` and `plan` take them."""

from __future__ import annotations

from inspect import signature
from typing import Any, TypedDict

from clearhead._attention import Arguments, ScoreLike, attention
from clearhead.base.arrays import Array, Integers, is_numpy
from clearhead.base.keyword_hints import raise_unknown_keywords
from clearhead.base.shapes import AlignLike
from clearhead.biases.base import BiasLike
from clearhead.masks.base import MaskLike
from clearhead.problem.layout import ARRANGED, arrange, is_arranged
from clearhead.problem.lengths import apply_valid_lens


class ProblemOptions(TypedDict, total=False):
    """The options of `attention` on which the weights depend."""

    score: ScoreLike
    mask: MaskLike
    valid_lens: Integers | None
    bias: BiasLike
    scale: float | None
    sinks: Array | None
    align: AlignLike


class AttentionOptions(ProblemOptions, total=False):
    """The options of `attention` but its engine."""

    dropout_p: float
    layout: str


def bind_attention(who: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Arguments, tuple[Any, ...]]:
    """The call of `attention` with these arguments, the heads before the length; and query, key and value as given.

    `who`: the function that was given them, for errors.
    """
    try:
        given = signature(attention).bind(*inputs, **options).arguments
    except TypeError as error:
        raise TypeError(f"{who}() takes the arguments of attention(), or a module and its inputs: {error}.") from None
    raise_unknown_keywords(who, attention, given.pop("others", {}))
    sides = {name: given[name] for name in ("query", "key", "value")}
    is_numpy(**sides)
    given["mask"], given["bias"] = apply_valid_lens(given.get("mask"), given.pop("valid_lens", None), given.get("bias"))
    layout = given.pop("layout", "BHLD")
    query, key, value, mask, bias, align = map(given.get, ARRANGED)
    if not is_arranged(query, key, layout):
        given |= zip(ARRANGED, arrange(query, key, value, mask, bias, align, layout), strict=False)
    return Arguments(**given), tuple(sides.values())
