"""The cosine score."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.base.numbers import check_positive
from clearhead.scores.base import Pairwise, Score, check_equal_width


class Cosine(Score):
    """The cosine of the angle between query and key, over a temperature.

    >>> import torch, clearhead as ch
    >>> ch.Cosine(temperature=0.5)(torch.tensor([[3.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
    tensor([[2., 0.]])

    Formula: s_ij = (q_i · k_j) / (‖q_i‖ ‖k_j‖ temperature); a zero vector scores 0.

    `temperature`: above 0; smaller is sharper. `softcap`: as for every `Score`.
    Takes query (..., Lq, E), key (..., Lk, E); gives (..., Lq, Lk).
    Raises `ShapeError` where the widths differ. Cost: 2·Lq·Lk·E operations.
    Source: Graves et al. 2014, "Neural Turing Machines", content addressing.
    """

    def __init__(self, temperature: float = 1.0, *, softcap: float | None = None) -> None:
        super().__init__(softcap=softcap)
        self.temperature = check_positive(temperature, "temperature")

    def tile(self, query: Tensor, key: Tensor) -> Tensor:
        return unit(query) @ unit(key).transpose(-1, -2) / self.temperature

    def lower(self, query: Tensor, key: Tensor) -> Pairwise:
        return Pairwise("mul", unit(query), unit(key), scale=1 / self.temperature)

    def own_scale(self) -> str | None:
        return "temperature"

    def check(self, query: Tensor, key: Tensor) -> None:
        check_equal_width(self, query, key)

    def extra_repr(self) -> str:
        return self.described(f"temperature={self.temperature}")


def unit(vectors: Tensor) -> Tensor:
    """Each vector over its length. The largest entry is taken out first, so that no square overflows."""
    wide = vectors.float() if vectors.dtype in (torch.float16, torch.bfloat16) else vectors
    largest = wide.detach().abs().amax(-1, keepdim=True) if wide.shape[-1] else wide.new_ones(1)
    wide = wide / torch.where(largest > 0, largest, torch.ones_like(largest))
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return (wide / torch.where(length > 0, length, torch.ones_like(length))).to(vectors.dtype)
