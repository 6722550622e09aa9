"""The cosine score."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.base.numbers import check_positive
from clearhead.base.symbolic.expressions import short
from clearhead.base.symbolic.steps import Step, made
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

    product = True

    def __init__(self, temperature: float = 1.0, *, softcap: float | None = None) -> None:
        super().__init__(softcap=softcap)
        self.temperature = check_positive(temperature, "temperature")

    def tile(self, query: Tensor, key: Tensor) -> Tensor:
        return unit(query) @ unit(key).transpose(-1, -2) / self.temperature

    def steps(self, query: Step, key: Step) -> list[Step]:
        of_query, of_key = _unit_steps(query), _unit_steps(key)
        why = "The product of two vectors of length 1 is the cosine of the angle between them: from -1 to 1."
        cosines = made("cosines", why, of_query[-1] @ of_key[-1].transpose(-1, -2))
        why = "Cosines alone differ by at most 2. The smaller the temperature, the farther apart the scores."
        return [*of_query, *of_key, cosines, made("scores", why, cosines / short(self.temperature))]

    def lower(self, query: Tensor, key: Tensor) -> Pairwise:
        return Pairwise("mul", unit(query), unit(key), scale=1 / self.temperature)

    def _scale_argument(self) -> str | None:
        return "temperature"

    def check(self, query: Tensor, key: Tensor) -> None:
        check_equal_width(self, query, key)

    def extra_repr(self) -> str:
        return self._format_options(f"temperature={self.temperature}")


def _unit_steps(side: Step) -> list[Step]:
    """The norms of queries or keys, and the vectors divided by them."""
    name = side.name
    norms = side.vector_norm(dim=-1, keepdim=True)
    # in float64 no square of a float32 number overflows or becomes 0
    wide = side.vector_norm(dim=-1, keepdim=True, dtype=torch.float64).to(side.value.dtype)
    if not torch.allclose(norms.value, wide.value, equal_nan=True, atol=0.0):
        norms = wide
    length = made(f"{name}_norms", f"The length of each {name} as a vector: the root of the sum of its squares.", norms)
    why = f"Each {name} divided by its length, so that only its direction counts; a vector of zeros stays zero."
    over = side / length.masked_fill(length.eq(0), 1.0)
    return [length, made(f"unit_{name}", why, over, value=unit(side.value))]


def unit(vectors: Tensor) -> Tensor:
    """Each vector divided by its length. It is divided by its largest entry first, so that no square overflows."""
    wide = vectors.float() if vectors.dtype in (torch.float16, torch.bfloat16) else vectors
    largest = wide.detach().abs().amax(-1, keepdim=True) if wide.shape[-1] else wide.new_ones(1)
    wide = wide / torch.where(largest > 0, largest, torch.ones_like(largest))
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return (wide / torch.where(length > 0, length, torch.ones_like(length))).to(vectors.dtype)
