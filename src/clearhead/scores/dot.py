"""The scaled dot product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.errors import ShapeError
from clearhead.base.numbers import check_number, check_positive
from clearhead.scores.base import (
    Pairwise,
    Score,
    check_equal_width,
    given_parameter,
)


class Dot(Score):
    """The scaled dot product, the score of the Transformer.

    >>> import torch, clearhead as ch
    >>> ch.Dot()(torch.ones(2, 4), torch.ones(3, 4))
    tensor([[2., 2., 2.],
            [2., 2., 2.]])

    Formula: s_ij = scale · Σ_d q_id k_jd, then, with a softcap c, s_ij ← c · tanh(s_ij / c).

    With sinks, the softmax's denominator has one term more, so that a query's weights sum to less than 1:
    w_ij = exp(s_ij) / (exp(sink_h) + Σ_j exp(s_ij)).

    `scale`: a number; None is 1/√E. `softcap`: a number above 0, or None for none.
    `sinks`: (H,), one logit a head, or None; an nn.Parameter is shared, anything else copied into a learnable one.
    Takes query (..., Lq, E), key (..., Lk, E); gives (..., Lq, Lk) of their dtype.
    Raises `ShapeError` where the widths differ, or the sinks and the heads. Cost: 2·Lq·Lk·E operations.
    Sources: Vaswani et al. 2017, "Attention Is All You Need"; the softcap: Gemma Team 2024, "Gemma 2"; the sinks:
    Xiao et al. 2024, "Efficient Streaming Language Models with Attention Sinks"; learnt ones: OpenAI 2025, gpt-oss.
    """

    sinks: nn.Parameter | None

    def __init__(self, scale: float | None = None, softcap: float | None = None, sinks: Any = None) -> None:
        super().__init__()
        self.scale = None if scale is None else check_number(scale, "scale")
        self.softcap = None if softcap is None else check_positive(softcap, "softcap")
        self.sinks = None if sinks is None else given_parameter(sinks, "sinks", 1)

    def factor(self, width: int) -> float:
        """The scale in force at this width."""
        return (width**-0.5 if width else 1.0) if self.scale is None else self.scale

    def tile(self, query: Tensor, key: Tensor) -> Tensor:
        scores = query @ key.transpose(-1, -2) * self.factor(query.shape[-1])
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def lower(self, query: Tensor, key: Tensor) -> Pairwise:
        return Pairwise("mul", query, key, scale=self.factor(query.shape[-1]), softcap=self.softcap, sinks=self.sinks)

    def check(self, query: Tensor, key: Tensor) -> None:
        check_equal_width(self, query, key)
        if self.sinks is not None:
            super().check(query, key)
            if self.sinks.shape[0] != query.shape[1]:
                raise ShapeError(
                    f"Dot: sinks has shape {tuple(self.sinks.shape)} and the query {query.shape[1]} heads, as "
                    f"{tuple(query.shape)}; expected one logit a head, ({query.shape[1]},)."
                )

    def extra_repr(self) -> str:
        parts = {"scale": self.scale, "softcap": self.softcap}
        shown = [f"{name}={value}" for name, value in parts.items() if value is not None]
        return ", ".join(shown if self.sinks is None else [*shown, f"sinks=<{self.sinks.shape[0]}>"])
