"""Attention with linear biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.numbers import check_count
from clearhead.base.positions import positions, query_offset
from clearhead.base.shapes import Sides, Sizes, placed
from clearhead.base.symbolic.steps import PAIRS, Step, made
from clearhead.base.torch_state.tensor_kind import is_readable
from clearhead.base.torch_state.torch_private import convert
from clearhead.biases.base import Added, Bias, check_heads, distances, wide


class ALiBi(Bias):
    """A penalty that grows with the distance, steeper in some heads than in others.

    >>> import torch, clearhead as ch
    >>> x = torch.rand(2, 8, 10, 16)
    >>> ch.attention(x, x, x, mask=ch.Causal(), bias=ch.ALiBi(num_heads=8)).shape
    torch.Size([2, 8, 10, 16])

    Formula: b_hij = −m_h · |i + p − j|, where p is the position of query 0 and m_h = 2^(−8h/H) for h = 1 … H.
    Where H is no power of two, the slopes are those for the next lower power, then every second slope for the next
    higher.

    `num_heads`: H. Where Lq ≠ Lk, `align=` of the call says p. `slopes`, (H,), is a buffer outside the state dict;
    `alibi.slopes.requires_grad_()` makes it receive gradients. Slopes of the formula are in float32 at least, and
    exact, after `module.half()` and `module.to_empty(...)` too; slopes that were set are converted.
    Raises a `ShapeError` for another number of heads.
    Cost: O(Lq + Lk) numbers a head. Source: Press et al. 2022, "Train Short, Test Long".
    """

    slopes: Tensor
    positional = True

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        numbers = _slopes(check_count(num_heads, 1, "ALiBi: num_heads", most=2**16))
        self.register_buffer("slopes", torch.tensor(numbers), persistent=False)
        if self.slopes.is_meta:  # under `torch.device("meta")`: no state dict brings the numbers later
            self.slopes = torch.tensor(numbers, device="cpu")

    def reset_parameters(self) -> None:
        """Set the slopes to those of the formula."""
        with torch.no_grad():
            self.slopes.copy_(_like(self.slopes))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ALiBi:
        """Convert the module, as `to`, `half` and `to_empty` do. Slopes of the formula are made anew where the
        conversion took digits or values from them."""
        slopes = self.slopes
        ours = slopes.is_meta or (is_readable(slopes) and bool((slopes == _like(slopes)).all()))
        convert(self, fn, recurse)
        left = self.slopes
        if ours and not isinstance(left, nn.Parameter) and is_readable(left):
            whole = _like(wide(left))
            if left.dtype != whole.dtype or not bool((left == whole).all()):
                self.slopes = whole.requires_grad_(slopes.requires_grad)
        return self

    @classmethod
    def example(cls, sizes: Sizes) -> Bias:
        bias = cls(sizes.heads)
        bias.slopes.requires_grad_()
        return bias

    def steps(self, sizes: Sizes, at: Sides, name: str = "bias") -> list[Step]:
        rows, columns = positions(sizes, at, name, "ALiBi")
        why = "How far the key stands from the query, before or after it. The column and the row broadcast to a matrix."
        far = made(f"{name}_distances", why, (columns - rows).abs(), PAIRS)
        slopes = self._slope_steps(at[1], name, sizes)
        why = (
            "Each step away from the query takes one slope off the score, so that near keys get more weight; the "
            "steeper a head's slope, the nearer the keys that it looks at."
        )
        return [rows, columns, far, *slopes, made(name, why, -slopes[-1] * far, PAIRS)]

    def _slope_steps(self, heads: slice, name: str, sizes: Sizes) -> list[Step]:
        """The slopes of some heads: by their formula, or, where they were set or learnt, as numbers."""
        slopes = wide(placed(self.slopes, sizes.device, "ALiBi"))[heads][None, :, None, None]
        axes, power = (*PAIRS[:2], "1", "1"), _power(len(self.slopes))
        numbers = slopes.new_tensor(_places(len(self.slopes)))[heads][None, :, None, None]
        why = "The number of each head, counted from 1."
        if power < len(self.slopes):
            why += f" Heads after head {power}, the last power of two, stand half way between the others: 0.5, 1.5, …"
        places = Step(f"{name}_places", why, numbers, axes)
        by_place = 2 ** (-8 * places / power)
        if slopes.requires_grad or not torch.allclose(by_place.value, slopes, rtol=1e-6, atol=0.0):
            return [Step(f"{name}_slopes", "The slope of each head: these were set or learnt.", slopes, axes)]
        why = "The slope of each head: the higher its place, the flatter it is, down to 2^-8."
        return [places, made(f"{name}_slopes", why, by_place, value=slopes)]

    def lower(self, sizes: Sizes) -> Added:
        check_heads(self, self.slopes.shape[0], sizes)
        far = distances(sizes, query_offset(sizes, "ALiBi")).abs()
        slopes = wide(placed(self.slopes, sizes.device, "ALiBi"))
        return Added(relative=far[:, None].to(slopes.dtype) * slopes.neg()[:, None])

    def extra_repr(self) -> str:
        return f"{self.slopes.shape[0]}"


def _like(slopes: Tensor) -> Tensor:
    """The slopes of the formula, of these heads' number, dtype and device."""
    return torch.tensor(_slopes(len(slopes)), dtype=slopes.dtype, device=slopes.device)


def _slopes(heads: int) -> list[float]:
    return [2 ** (-8 * place / _power(heads)) for place in _places(heads)]


def _power(heads: int) -> int:
    """The largest power of two that is at most `heads`."""
    return 1 << (heads.bit_length() - 1)


def _places(heads: int) -> list[float]:
    """The place of each head among 1 … `_power(heads)`; heads beyond it stand half way between two others."""
    power = _power(heads)
    return [*range(1, power + 1), *(place - 0.5 for place in range(1, heads - power + 1))]
