"""The arguments `score`, `bias`, `scale` and `sinks` of a call, each validated by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from clearhead.base.arrays import check_float, is_dense, shown, to_tensor
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.numbers import check_number
from clearhead.base.output.text import brief
from clearhead.base.shapes import Sizes, no_heads
from clearhead.biases.base import Bias
from clearhead.biases.bias_in_documents import BiasInDocuments
from clearhead.biases.dense import DenseBias
from clearhead.masks.base import Mask
from clearhead.scores.base import Score
from clearhead.scores.dot import Dot
from clearhead.scores.score_function import ScoreFunction

DOT = Dot()


def as_score(score: Any) -> Score:
    """The argument `score` as a `Score`: None is the dot product, and a function becomes a `ScoreFunction`."""
    if score is None:
        return DOT
    if isinstance(score, Score):
        return score
    if callable(score) and not isinstance(score, type):
        return ScoreFunction(score)
    raise ClearheadError(
        f"score is {brief(score)}; expected an instance of a Score, such as Dot(), or a function f(query_tile, "
        "key_tile)."
    )


def as_bias(bias: Any, mask: Any) -> Bias:
    """The argument `bias` as a `Bias`, which counts inside the documents of the mask."""
    if isinstance(bias, Tensor | np.ndarray):
        bias = DenseBias(bias)
    if not isinstance(bias, Bias):
        raise make_type_error("bias", bias, "a Bias, such as ALiBi(num_heads), or a float tensor")
    edges = mask._document_edges if isinstance(mask, Mask) else None
    return bias if edges is None else BiasInDocuments(bias, edges)


def validate_scale(scale: Any, score: Score) -> float:
    own = score._scale_argument()
    if own is not None:
        raise ClearheadError(
            f"scale is {brief(scale, 40)}, and {score} has its own, by its {own}: pass one of the two."
        )
    return check_number(scale, "scale")


def as_sinks(given: Any, sizes: Sizes) -> Tensor:
    """One logit a head, (H,)."""
    if not (isinstance(given, np.ndarray) or is_dense(given)) or tuple(given.shape) != (sizes.heads,):
        raise ShapeError(
            f"sinks is {shown(given)}, and the scores have {sizes.heads} heads, "
            f"{(*sizes.shown, sizes.queries, sizes.keys)}; expected one logit a head, ({sizes.heads},): for sinks that "
            f"begin at 0, torch.zeros({sizes.heads})." + no_heads(sizes)
        )
    sinks: Tensor = to_tensor(given, "sinks")
    check_float(sinks, "sinks")
    if sinks.device != sizes.device:
        raise ClearheadError(f"sinks is on {sinks.device}, the inputs on {sizes.device}; pass sinks.to(query.device).")
    return sinks


def make_type_error(name: str, given: Any, expected: str) -> ClearheadError:
    """The error for a mask or a bias that is none; of a function, or a BlockMask, it names the class for rules."""
    rule = "mask.mask_mod" if name == "mask" and callable(getattr(given, "mask_mod", None)) else name
    if isinstance(given, type) or (rule == name and not callable(given)):
        return ClearheadError(f"{name} is {brief(given)}; expected {expected}.")
    return ClearheadError(
        f"{name} is a {type(given).__name__}; expected {expected}.\nA rule, a function of (batch, head, query_index, "
        f"key_index), pass as {name.capitalize()}Function({rule})."
    )
