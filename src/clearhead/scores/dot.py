"""The scaled dot product."""

from __future__ import annotations

import math

from torch import Tensor

from clearhead.base.numbers import check_number
from clearhead.base.symbolic.steps import Step, made
from clearhead.scores.base import Pairwise, Score, check_equal_width


class Dot(Score):
    """The scaled dot product, the score of the Transformer.

    >>> import torch, clearhead as ch
    >>> ch.Dot()(torch.ones(2, 4), torch.ones(3, 4))
    tensor([[2., 2., 2.],
            [2., 2., 2.]])

    Formula: s_ij = scale · Σ_d q_id k_jd, then, with a softcap c, s_ij ← c · tanh(s_ij / c).

    `scale`: a number; None is 1/√E, or the scale that `attention` is given. `softcap`: a number above 0, or None.
    Takes query (..., Lq, E), key (..., Lk, E); gives (..., Lq, Lk), float32 at least.
    Raises `ShapeError` where the widths differ. Cost: 2·Lq·Lk·E operations.
    Source: Vaswani et al. 2017, "Attention Is All You Need"; the softcap: Gemma Team 2024, "Gemma 2".
    """

    product = True

    def __init__(self, scale: float | None = None, softcap: float | None = None) -> None:
        super().__init__(softcap=softcap)
        self.scale = None if scale is None else check_number(scale, "scale")

    def _default_scale(self, width: int) -> float:
        # the same bits as the 1 / √E of SDPA
        return (1 / math.sqrt(width) if width else 1.0) if self.scale is None else self.scale

    def _scale_argument(self) -> str | None:
        return None if self.scale is None else "scale"

    def tile(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.transpose(-1, -2)

    def steps(self, query: Step, key: Step) -> list[Step]:
        why = (
            "Each query is multiplied with each key, entry by entry, and the products are added: the matrix product "
            "query · keyᵀ. It is large where the two vectors point the same way."
        )
        return [made("scores", why, query @ key.transpose(-1, -2))]

    def lower(self, query: Tensor, key: Tensor) -> Pairwise:
        return Pairwise("mul", query, key)

    def check(self, query: Tensor, key: Tensor) -> None:
        if query.shape[-1] != key.shape[-1]:
            check_equal_width(self, query, key)

    def extra_repr(self) -> str:
        return self._format_options(*([] if self.scale is None else [f"scale={self.scale}"]))
