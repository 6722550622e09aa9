"""The bilinear score."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.base.arrays import Array
from clearhead.base.products import multiply
from clearhead.base.symbolic.steps import Step, made
from clearhead.scores.base import Pairwise, Score, check_width, draw_linear, given_parameter, linear_weight


class Bilinear(Score):
    """Luong's "general" score: a learnt matrix between query and key, whose widths may differ.

    >>> import torch, clearhead as ch
    >>> ch.Bilinear(query_dim=4, key_dim=6)(torch.ones(2, 4), torch.ones(3, 6)).shape
    torch.Size([2, 3])

    Formula: s_ij = q_iᵀ W k_j, with W of shape (Eq, Ek). There is no further scale.

    Takes query (..., Lq, Eq), key (..., Lk, Ek); gives (..., Lq, Lk). `Bilinear.from_weights(W)` takes a given W.
    `softcap`: as for every `Score`. `device`, `dtype`: those of W; None is the default of PyTorch.
    Raises `ShapeError` for other widths. Cost: 2·Lq·Eq·Ek + 2·Lq·Lk·Ek operations.
    Source: Luong et al. 2015, "Effective Approaches to Attention-based Neural Machine Translation".
    """

    product = True

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        *,
        softcap: float | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(softcap=softcap)
        self.W = linear_weight(query_dim, key_dim, device, dtype)

    def reset_parameters(self) -> None:
        """Draw the matrix anew, as `torch.nn.Linear` draws its own."""
        draw_linear(self.W)

    @classmethod
    def from_weights(cls, W: Array, *, softcap: float | None = None) -> Bilinear:
        """The score over a given W (Eq, Ek): an nn.Parameter is shared, other arrays are copied.

        >>> import torch, clearhead as ch
        >>> ch.Bilinear.from_weights(torch.eye(3))(torch.ones(2, 3), torch.ones(1, 3)).tolist()
        [[3.0], [3.0]]
        """
        weight = given_parameter(W, "W", 2)
        score = cls(*weight.shape, softcap=softcap)
        score.W = weight
        return score

    @classmethod
    def example(cls) -> tuple[Score, int, int]:
        return cls(4, 6), 4, 6

    def tile(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ self.W @ key.transpose(-1, -2)

    def steps(self, query: Step, key: Step) -> list[Step]:
        factors = "Learnt: the factor of entry d of a query times entry e of a key."
        W = Step("W", factors, self.W, ("Eq", "Ek"))
        turned = made("turned", "The matrix makes each query a vector of the key's width.", query @ W)
        scores = made("scores", "Then it is a dot product with each key.", turned @ key.transpose(-1, -2))
        return [W, turned, scores]

    def lower(self, query: Tensor, key: Tensor) -> Pairwise:
        return Pairwise("mul", multiply(query, self.W), key)

    def check(self, query: Tensor, key: Tensor) -> None:
        super().check(query, key)
        check_width(self, query, self.W.shape[0], "query")
        check_width(self, key, self.W.shape[1], "key")

    def extra_repr(self) -> str:
        return self._format_options(f"query_dim={self.W.shape[0]}", f"key_dim={self.W.shape[1]}")
