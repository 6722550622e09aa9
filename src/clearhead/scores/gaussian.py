"""The Gaussian score."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clearhead.base.errors import ShapeError
from clearhead.base.numbers import check_positive
from clearhead.base.symbolic.steps import Step, made
from clearhead.base.torch_state.modules import Values, set_again, values_of
from clearhead.scores.base import Pairwise, Score, check_equal_width


class Gaussian(Score):
    """The Gaussian kernel's exponent: attention with it is Nadaraya–Watson regression.

    >>> import torch, clearhead as ch
    >>> ch.Gaussian()(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [2.0]]))
    tensor([[-0.5000, -0.5000],
            [-4.5000, -0.5000]])

    Formula: s_ij = −‖q_i − k_j‖² / (2 σ²), with σ the bandwidth. The differences are taken before they are squared:
    the expanded form ‖q‖² − 2q·k + ‖k‖² loses every digit where inputs share a large offset.

    `bandwidth`: a number above 0, in the unit of the inputs, or an nn.Parameter of one number, which is then learnt.
    `softcap`: as for every `Score`.
    Takes query (..., Lq, E), key (..., Lk, E); gives (..., Lq, Lk).
    Raises `ShapeError` where the widths differ. Cost: 3·Lq·Lk·E operations.
    Sources: Nadaraya 1964, "On Estimating Regression"; Watson 1964, "Smooth Regression Analysis".
    """

    bandwidth: float | nn.Parameter
    _given: Values | None = None  # the bandwidth at first, of a parameter

    def __init__(self, bandwidth: float | nn.Parameter = 1.0, *, softcap: float | None = None) -> None:
        super().__init__(softcap=softcap)
        if isinstance(bandwidth, nn.Parameter) and bandwidth.numel() != 1:
            raise ShapeError(f"bandwidth has shape {tuple(bandwidth.shape)}; expected one number for all dimensions.")
        self.bandwidth = bandwidth if isinstance(bandwidth, nn.Parameter) else check_positive(bandwidth, "bandwidth")
        if isinstance(bandwidth, nn.Parameter):
            self._given = values_of(bandwidth)

    def reset_parameters(self) -> None:
        """Set a learnt bandwidth to the number that was given."""
        if isinstance(self.bandwidth, nn.Parameter):
            set_again("bandwidth", self.bandwidth, self._given)

    def tile(self, query: Tensor, key: Tensor) -> Tensor:
        difference = query.unsqueeze(-2) - key.unsqueeze(-3)
        return -difference.square().sum(-1) / (2 * self._width() ** 2)

    def steps(self, query: Step, key: Step) -> list[Step]:
        why = (
            "The squared distance of query and key. (Multiplied out, it would lose digits where all inputs share a "
            "large offset.)"
        )
        squared = made("squared", why, (query.unsqueeze(-2) - key.unsqueeze(-3)).square().sum(-1))
        width = torch.as_tensor(self._width(), dtype=squared.value.dtype, device=squared.value.device)
        why = "The bandwidth, in the unit of the inputs: keys much farther away than this get almost no weight."
        bandwidth = Step("bandwidth", why, width, ())
        near = "Near keys get a score near 0, far keys one far below 0. exp(score) is the Gaussian kernel."
        exact = -squared.value / (2 * self._width() ** 2)
        scores = -squared / (2 * bandwidth**2)
        return [squared, bandwidth, made("scores", near, scores, value=exact, by=scores)]

    def lower(self, query: Tensor, key: Tensor) -> Pairwise:
        return Pairwise("sq_diff", query, key, scale=-1 / (2 * self._width() ** 2))  # type: ignore[arg-type]

    def _width(self) -> float | Tensor:
        return self.bandwidth if isinstance(self.bandwidth, float) else self.bandwidth.reshape(())

    def _scale_argument(self) -> str | None:
        return "bandwidth"

    def check(self, query: Tensor, key: Tensor) -> None:
        super().check(query, key)
        check_equal_width(self, query, key)

    def extra_repr(self) -> str:
        learnt = isinstance(self.bandwidth, nn.Parameter)
        return self._format_options("bandwidth=<learnt>" if learnt else f"bandwidth={self.bandwidth}")
