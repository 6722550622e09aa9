"""The cosine score."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.base.numbers import check_positive
from clearhead.base.steps import INDEX, Back, Step, back_of_pairs, number, of_pairs
from clearhead.scores.base import SCORES, Pairwise, Score, check_equal_width


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

    def steps(self, query: Tensor, key: Tensor) -> list[Step]:
        found = [*_unit_steps("query", "Lq", query), *_unit_steps("key", "Lk", key)]
        unit_query, unit_key = found[1].value, found[3].value
        cosines = unit_query @ unit_key.transpose(-1, -2)
        why = "The product of two vectors of length 1 is the cosine of the angle between them: from -1 to 1."
        formula = "cosines[i, j] = Σ_d unit_query[i, d] · unit_key[j, d]"
        code, cell = "cosines = unit_query @ unit_key.transpose(-1, -2)", of_pairs(unit_query, unit_key)
        back = back_of_pairs("unit_query", "unit_key")
        found.append(Step("cosines", formula, why, cosines, SCORES, code, cell, back=back))
        why = "Cosines alone differ by at most 2. The smaller the temperature, the farther apart the scores."
        formula, code = (
            f"scores[i, j] = cosines[i, j] / {self.temperature!r}",
            f"scores = cosines / {self.temperature!r}",
        )

        def over(at: tuple[int, ...]) -> str:
            return f"{number(cosines[at])} / {number(self.temperature)}"

        scores = cosines / self.temperature
        back = {"cosines": Back(f"d_cosines[i, j] = {{d}}[i, j] / {self.temperature!r}")}
        return [*found, Step("scores", formula, why, scores, SCORES, code, over, back=back)]

    def lower(self, query: Tensor, key: Tensor) -> Pairwise:
        return Pairwise("mul", unit(query), unit(key), scale=1 / self.temperature)

    def own_scale(self) -> str | None:
        return "temperature"

    def check(self, query: Tensor, key: Tensor) -> None:
        check_equal_width(self, query, key)

    def extra_repr(self) -> str:
        return self.described(f"temperature={self.temperature}")


def _unit_steps(name: str, length: str, side: Tensor) -> list[Step]:
    """The norms of queries or keys, and the vectors over them."""
    norms, i = torch.linalg.vector_norm(side, dim=-1, keepdim=True), INDEX[length]
    why = f"The length of each {name} as a vector: the root of the sum of its squares."
    code = f"torch.linalg.vector_norm({name}, dim=-1, keepdim=True)"
    # in float64 no square of a float32 number overflows or becomes 0
    wide = torch.linalg.vector_norm(side, dim=-1, keepdim=True, dtype=torch.float64).to(side.dtype)
    if not torch.allclose(norms, wide, equal_nan=True, atol=0.0):
        norms, code = wide, f"{code[:-1]}, dtype=torch.float64).to({side.dtype})"
    formula = f"{name}_norms[{i}] = √(Σ_d {name}[{i}, d]²)"
    first = Step(f"{name}_norms", formula, why, norms, ("B", "H", length, "1"), f"{name}_norms = {code}")

    def over(at: tuple[int, ...]) -> str:
        return f"{number(side[at])} / {number(norms[*at[:3], 0])}"

    why = f"Each {name} divided by its length, so that only its direction counts; a vector of zeros stays one."
    code = f"unit_{name} = {name} / {name}_norms.masked_fill({name}_norms == 0, 1.0)"
    formula = f"unit_{name}[{i}, d] = {name}[{i}, d] / {name}_norms[{i}]"
    return [first, Step(f"unit_{name}", formula, why, unit(side), ("B", "H", length, "E"), code, over)]


def unit(vectors: Tensor) -> Tensor:
    """Each vector over its length. The largest entry is taken out first, so that no square overflows."""
    wide = vectors.float() if vectors.dtype in (torch.float16, torch.bfloat16) else vectors
    largest = wide.detach().abs().amax(-1, keepdim=True) if wide.shape[-1] else wide.new_ones(1)
    wide = wide / torch.where(largest > 0, largest, torch.ones_like(largest))
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return (wide / torch.where(length > 0, length, torch.ones_like(length))).to(vectors.dtype)
