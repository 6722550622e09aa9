"""The arguments `score`, `bias`, `scale` and `sinks` of a call, validated one by one."""

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
    """Return the argument `score` as a `Score`: None is the dot product, a function becomes a `ScoreFunction`."""
    if score is None:
        return DOT
    if isinstance(score, Score):
        return score
    if callable(score) and not isinstance(score, type):
        return ScoreFunction(score)
    raise ClearheadError(
        f"score is {brief(score)}; expected an instance of a Score, such as Dot(), or a function of query and key "
        "tiles."
    )


def as_bias(bias: Any, mask: Any) -> Bias:
    """Return the argument `bias` as a `Bias`, which counts positions inside the documents of the mask."""
    if isinstance(bias, Tensor | np.ndarray):
        bias = DenseBias(bias)
    if not isinstance(bias, Bias):
        raise make_type_error("bias", bias, "a Bias, such as ALiBi(num_heads), or a float tensor")
    edges = mask._document_edges if isinstance(mask, Mask) else None
    return bias if edges is None else BiasInDocuments(bias, edges)


def validate_scale(scale: Any, score: Score) -> float:
    """Return the argument `scale` as a number; raise if the score has a scale itself."""
    own = score._scale_argument()
    if own is not None:
        raise ClearheadError(
            f"scale is {brief(scale, 40)}, but {score} has its own, by its {own}; pass one of the two."
        )
    return check_number(scale, "scale")


def as_sinks(given: Any, sizes: Sizes) -> Tensor:
    """Return the argument `sinks` as a tensor (H,), one logit for each head."""
    if not (isinstance(given, np.ndarray) or is_dense(given)) or tuple(given.shape) != (sizes.heads,):
        raise ShapeError(
            f"sinks is {shown(given)}; expected one logit for each head, ({sizes.heads},), for scores "
            f"{(*sizes.shown, sizes.queries, sizes.keys)}.\nFor sinks of 0 pass torch.zeros({sizes.heads})."
            + no_heads(sizes)
        )
    sinks: Tensor = to_tensor(given, "sinks")
    check_float(sinks, "sinks")
    if sinks.device != sizes.device:
        raise ClearheadError(f"sinks is on {sinks.device}; expected {sizes.device}. Pass sinks.to(query.device).")
    return sinks


def make_type_error(name: str, given: Any, expected: str) -> ClearheadError:
    """Make the error for a mask or a bias of a wrong type; for a function it names the class to use."""
    rule = "mask.mask_mod" if name == "mask" and callable(getattr(given, "mask_mod", None)) else name
    if isinstance(given, type) or (rule == name and not callable(given)):
        return ClearheadError(f"{name} is {brief(given)}; expected {expected}.")
    return ClearheadError(
        f"{name} is a {type(given).__name__}; expected {expected}.\nPass a function of (batch, head, query_index, "
        f"key_index) as {name.capitalize()}Function({rule})."
    )
