"""weights(): the lazy matrix of a call's weights."""

from __future__ import annotations

from typing import Never

from clearhead._attention import Arguments, ScoreLike
from clearhead.base.arrays import Array, ArrayT, Integers, is_numpy
from clearhead.base.errors import ClearheadError
from clearhead.base.keyword_hints import raise_unknown_keywords
from clearhead.base.shapes import AlignLike
from clearhead.biases.base import BiasLike
from clearhead.engines.base import Engine
from clearhead.inspection.source import FromCall
from clearhead.inspection.weights import Weights
from clearhead.masks.base import MaskLike
from clearhead.problem.layout import arrange, is_arranged
from clearhead.problem.lengths import apply_valid_lens


def weights(
    query: ArrayT,
    key: ArrayT,
    *value: Never,
    score: ScoreLike = None,
    mask: MaskLike = None,
    valid_lens: Integers | None = None,
    bias: BiasLike = None,
    scale: float | None = None,
    sinks: Array | None = None,
    align: AlignLike = None,
    layout: str = "BHLD",
    engine: str | Engine | None = None,
    **others: Never,
) -> Weights[ArrayT]:
    """The attention weights as a lazy matrix: nothing is computed until you look at a part or a summary of it.

    >>> import torch, clearhead as ch
    >>> w = ch.weights(torch.rand(1, 8, 4096, 64), torch.rand(1, 8, 4096, 64), mask=ch.Causal())
    >>> w[0, 3, 1000].shape
    torch.Size([4096])
    >>> w[0, 3, 1000, 2000]
    tensor(0.)

    Formula: w_i = softmax over the allowed keys j of score(query_i, key_j); all 0 where nothing is allowed.
    Arguments as for `attention`. Returns a `Weights` of shape (..., Lq, Lk), in any layout. Of nested tensors it is the
    matrix of the packed row, (1, H, T, T'), where T and T' count the positions of all sequences.
    Raises `ClearheadError`, `ShapeError` or `UnsupportedError` (`engine="sdpa"` does not show its weights).
    Cost: that of the parts you look at; see `Weights`.
    """
    if value or "value" in others:
        raise ClearheadError(
            "weights takes query and key alone: the weights depend on no value. Pass weights(query, key), with "
            "options as keywords; the output is attention(query, key, value)."
        )
    if others:
        raise_unknown_keywords("weights", weights, others)
    is_numpy(query=query, key=key)
    mask, bias = apply_valid_lens(mask, valid_lens, bias)
    if not is_arranged(query, key, layout):
        query, key, _, mask, bias, align, _ = arrange(query, key, None, mask, bias, align, layout)
    call = Arguments(query, key, None, score, mask, bias, scale, sinks, align, 0.0, engine)
    return Weights(FromCall(call), engine)
