"""Attention with linear biases."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clearhead.base.errors import ShapeError
from clearhead.base.numbers import check_count
from clearhead.base.positions import query_offset
from clearhead.base.shapes import Sizes, no_heads, placed
from clearhead.biases.base import Added, Bias, distances, wide


class ALiBi(Bias):
    """A penalty that grows with the distance, steeper in some heads than in others.

    >>> import torch, clearhead as ch
    >>> x = torch.rand(2, 8, 10, 16)
    >>> ch.attention(x, x, x, mask=ch.Causal(), bias=ch.ALiBi(num_heads=8)).shape
    torch.Size([2, 8, 10, 16])

    Formula: b_hij = −m_h · |i + p − j|, where p is the position of query 0 and m_h = 2^(−8h/H) for h = 1 … H.
    Where H is no power of two, the slopes are those of the next lower one, then every second one of the next higher.

    `num_heads`: H. Where Lq ≠ Lk, `align=` of the call says p. `slopes`, (H,), is a buffer outside the state dict;
    `alibi.slopes.requires_grad_()` makes it receive gradients. Raises a `ShapeError` for another number of heads.
    Cost: O(Lq + Lk) numbers a head. Source: Press et al. 2022, "Train Short, Test Long".
    """

    slopes: Tensor
    positional = True

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        slopes = _slopes(check_count(num_heads, 1, "ALiBi: num_heads", most=2**16))
        self.register_buffer("slopes", torch.tensor(slopes), persistent=False)

    @classmethod
    def example(cls, sizes: Sizes) -> Bias:
        bias = cls(sizes.heads)
        bias.slopes.requires_grad_()
        return bias

    def lower(self, sizes: Sizes) -> Added:
        if sizes.heads != self.slopes.shape[0]:
            raise ShapeError(
                f"ALiBi has {self.slopes.shape[0]} heads and the scores have {sizes.heads}, "
                f"{(*sizes.shown, sizes.queries, sizes.keys)}; pass ALiBi({sizes.heads})." + no_heads(sizes)
            )
        far = distances(sizes, query_offset(sizes, "ALiBi")).abs()
        slopes = wide(placed(self.slopes, sizes.device, "ALiBi"))
        return Added(relative=far[:, None].to(slopes.dtype) * slopes.neg()[:, None])

    def extra_repr(self) -> str:
        return f"{self.slopes.shape[0]}"


def _slopes(heads: int) -> list[float]:
    power = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return first + [2 ** (-4 * h / power) for h in range(1, 2 * (heads - power), 2)]
