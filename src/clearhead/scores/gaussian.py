"""The Gaussian score."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clearhead.base.errors import ShapeError
from clearhead.base.numbers import check_positive
from clearhead.base.steps import Back, Step, number, signed, total
from clearhead.scores.base import SCORES, Pairwise, Score, check_equal_width


class Gaussian(Score):
    """The Gaussian kernel's exponent: attention with it is Nadaraya–Watson regression.

    >>> import torch, clearhead as ch
    >>> ch.Gaussian()(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [2.0]]))
    tensor([[-0.5000, -0.5000],
            [-4.5000, -0.5000]])

    Formula: s_ij = −‖q_i − k_j‖² / (2 h²), with h the bandwidth. The differences are taken before they are squared:
    the expanded form ‖q‖² − 2q·k + ‖k‖² loses every digit where inputs share a large offset.

    `bandwidth`: a number above 0, in the unit of the inputs, or an nn.Parameter of one, which is then learnt.
    `softcap`: as for every `Score`.
    Takes query (..., Lq, E), key (..., Lk, E); gives (..., Lq, Lk).
    Raises `ShapeError` where the widths differ. Cost: 3·Lq·Lk·E operations.
    Sources: Nadaraya 1964, "On Estimating Regression"; Watson 1964, "Smooth Regression Analysis".
    """

    bandwidth: float | nn.Parameter

    def __init__(self, bandwidth: float | nn.Parameter = 1.0, *, softcap: float | None = None) -> None:
        super().__init__(softcap=softcap)
        if isinstance(bandwidth, nn.Parameter) and bandwidth.numel() != 1:
            raise ShapeError(f"bandwidth has shape {tuple(bandwidth.shape)}; expected one number for all dimensions.")
        self.bandwidth = bandwidth if isinstance(bandwidth, nn.Parameter) else check_positive(bandwidth, "bandwidth")

    def tile(self, query: Tensor, key: Tensor) -> Tensor:
        difference = query.unsqueeze(-2) - key.unsqueeze(-3)
        return -difference.square().sum(-1) / (2 * self._width() ** 2)

    def steps(self, query: Tensor, key: Tensor) -> list[Step]:
        squared = (query.unsqueeze(-2) - key.unsqueeze(-3)).square().sum(-1)
        scores = -squared / (2 * self._width() ** 2)
        h = torch.as_tensor(self._width(), dtype=squared.dtype, device=squared.device)

        def distance(at: tuple[int, ...]) -> str:
            pairs = zip(query[at[:3]], key[(*at[:2], at[3])], strict=True)
            return total([f"({number(a)} - {signed(b)})²" for a, b in pairs], most=4)

        def exponent(at: tuple[int, ...]) -> str:
            return f"-{number(squared[at])} / (2 · {signed(h)}²)"

        why = (
            "The squared distance of query and key. (Multiplied out, it would lose digits where all inputs share a "
            "large offset.)"
        )
        code = "squared = (query.unsqueeze(-2) - key.unsqueeze(-3)).square().sum(-1)"
        formula = "squared[i, j] = Σ_d (query[i, d] - key[j, d])²"
        near = "Near keys get a score near 0, far keys one far below 0. exp(score) is the Gaussian kernel."
        last = "scores[i, j] = -squared[i, j] / (2 h²)"
        return [
            Step("squared", formula, why, squared, SCORES, code, distance),
            Step(
                "h",
                "",
                "The bandwidth, in the unit of the inputs: keys much farther away than h get almost no weight.",
                h,
                (),
            ),
            Step(
                "scores",
                last,
                near,
                scores,
                SCORES,
                "scores = -squared / (2 * h**2)",
                exponent,
                back={"squared": Back("d_squared[i, j] = -{d}[i, j] / (2 · h²)")},
            ),
        ]

    def lower(self, query: Tensor, key: Tensor) -> Pairwise:
        return Pairwise("sq_diff", query, key, scale=-1 / (2 * self._width() ** 2))  # type: ignore[arg-type]

    def _width(self) -> float | Tensor:
        return self.bandwidth if isinstance(self.bandwidth, float) else self.bandwidth.reshape(())

    def own_scale(self) -> str | None:
        return "bandwidth"

    def check(self, query: Tensor, key: Tensor) -> None:
        super().check(query, key)
        check_equal_width(self, query, key)

    def extra_repr(self) -> str:
        learnt = isinstance(self.bandwidth, nn.Parameter)
        return self.described("bandwidth=<learnt>" if learnt else f"bandwidth={self.bandwidth}")
