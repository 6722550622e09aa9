"""A matrix of low rank, kept as the two factors whose product it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from clearhead.base.errors import ShapeError
from clearhead.base.output.text import with_outline


@with_outline
class SVD(NamedTuple):
    """A singular value decomposition, U · diag(S) · Vh."""

    U: Tensor
    S: Tensor
    Vh: Tensor


@dataclass(frozen=True, eq=False)
class LowRank:
    """The product `left` @ `right`, (m, n), of rank r at most, which is never made whole unless `dense` is called.

    >>> import torch, clearhead as ch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=64, n_layer=2, n_head=8, n_positions=32)).eval()
    >>> ov = ch.models.circuits(model, {"input_ids": torch.arange(10)[None]}).ov(1, 3)
    >>> ov
    LowRank(64 × 64, of rank 8)
    >>> torch.allclose(ov.dense() @ torch.ones(64), ov @ torch.ones(64), atol=1e-5)
    True
    >>> ov.svd().S.shape, ov.eigenvalues().shape
    (torch.Size([8]), torch.Size([8]))

    `left`: (m, r). `right`: (r, n). Products with matrices and vectors, and with another `LowRank`, keep the factors.
    Cost: `svd`, `eigenvalues` and `norm` take O((m + n) r²) time and O((m + n) r) memory.
    """

    left: Tensor
    right: Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.left.shape[0], self.right.shape[1]))

    @property
    def T(self) -> LowRank:
        """The transposed matrix, (n, m)."""
        return LowRank(self.right.T, self.left.T)

    def dense(self) -> Tensor:
        """The matrix itself, (m, n)."""
        return self.left @ self.right

    def __matmul__(self, other: Tensor | LowRank) -> Tensor | LowRank:
        if isinstance(other, LowRank):
            return LowRank(self.left, (self.right @ other.left) @ other.right)
        return self.left @ (self.right @ other)

    def svd(self) -> SVD:
        """U (m, r), S (r,) descending, Vh (r, n), as `torch.linalg.svd(…, full_matrices=False)` names them."""
        left, above = torch.linalg.qr(self.left)
        right, below = torch.linalg.qr(self.right.mT)
        u, s, vh = torch.linalg.svd(above @ below.mT, full_matrices=False)
        return SVD(left @ u, s, vh @ right.mT)

    def eigenvalues(self) -> Tensor:
        """The eigenvalues that may differ from 0, complex (r,): those of the small product right · left.

        Raises a `ShapeError` for a matrix that is not square.
        """
        if self.shape[0] != self.shape[1]:
            raise ShapeError(f"eigenvalues: the matrix is {tuple(self.shape)}; a square one has eigenvalues.")
        return cast(Tensor, torch.linalg.eigvals(self.right @ self.left))

    def norm(self) -> Tensor:
        """The Frobenius norm: √ Σ of all squares."""
        above, below = torch.linalg.qr(self.left).R, torch.linalg.qr(self.right.mT).R
        return cast(Tensor, torch.linalg.matrix_norm(above @ below.mT))

    def __repr__(self) -> str:
        return f"LowRank({self.shape[0]} × {self.shape[1]}, of rank {self.left.shape[1]})"
