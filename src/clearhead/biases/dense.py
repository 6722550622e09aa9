"""A bias given in full."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clearhead.base.arrays import Array, check_float, owned
from clearhead.base.errors import ClearheadError
from clearhead.base.shapes import Sides, Sizes, fit
from clearhead.base.symbolic.steps import Step
from clearhead.biases.base import Added, Bias


class DenseBias(Bias):
    """Any numbers, given as a matrix; a float tensor passed as `bias=` or as `mask=` becomes a DenseBias.

    >>> import torch, clearhead as ch
    >>> x = torch.rand(2, 10, 16)
    >>> ch.attention(x, x, x, bias=ch.DenseBias(torch.rand(10, 10))).shape
    torch.Size([2, 10, 16])

    Formula: b_ij = tensor[..., i, j]; −∞ means that the pair is not allowed; +∞ makes the row of a query that may see
    the pair NaN.
    `tensor`: float, (Lq, Lk) or broadcasting to the scores: (B, Lq, Lk) without heads, (B, H, Lq, Lk) with heads. It is
    kept as it is (a NumPy array is copied): gradients reach it, and the state dict has it; an nn.Parameter is this
    module's own.
    Raises a `ClearheadError` for other dtypes and shapes. Cost: its own memory.
    """

    tensor: Tensor
    of_mask: bool = False  # whether the tensor is the float mask of a call, for explanations

    def __init__(self, tensor: Array) -> None:
        super().__init__()
        given = owned(tensor, "tensor")
        if not given.is_floating_point():
            raise ClearheadError(
                f"DenseBias: tensor has dtype {given.dtype}, shape {tuple(given.shape)}; expected floating-point "
                "numbers to add to the scores. For a bool matrix that says who may attend pass mask=DenseMask(keep)."
            )
        check_float(given, "DenseBias: tensor")
        if isinstance(given, nn.Parameter):
            self.tensor = given
        else:
            self.register_buffer("tensor", given)

    @classmethod
    def example(cls, sizes: Sizes) -> Bias:
        i, j = torch.arange(sizes.queries)[:, None], torch.arange(sizes.keys)[None, :]
        heads = torch.arange(sizes.heads)[:, None, None]
        tensor = torch.sin((1.0 + heads) * i - j).to(sizes.device)
        return cls(tensor[(None,) * (len(sizes.shown) - 1)].requires_grad_())

    def steps(self, sizes: Sizes, at: Sides, name: str = "bias") -> list[Step]:
        (step,) = super().steps(sizes, at, name)
        return [step.but(why="The float mask: a number for each pair.") if self.of_mask else step]

    def lower(self, sizes: Sizes) -> Added:
        return Added(dense=fit(self.tensor, sizes, "bias"))

    def extra_repr(self) -> str:
        return f"<{'×'.join(map(str, self.tensor.shape))}>"
