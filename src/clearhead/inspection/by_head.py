"""Numbers of each query head and key as values that weights sum up, where several query heads share a key head."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.base.shapes import unflatten


def as_value(numbers: Tensor, key_heads: int) -> Tensor:
    """n numbers for each head and key, (B, H, Lk, n), as a value (B, Hk, Lk, G · n): those of each group of G heads."""
    return unflatten(numbers, 1, key_heads, -1).transpose(2, 3).flatten(3)


def of_value(output: Tensor, count: int) -> Tensor:
    """The sums (B, H, Lq, n) of each head's own numbers, from the output (B, H, Lq, G · n) for such a value. Where one
    head's weights stand for all, (B, 1, Lq, G · n), the sums of all G heads."""
    output = unflatten(output, -1, -1, count)
    heads, group = output.shape[1], output.shape[3]
    if heads == 1:
        return output[:, 0].transpose(1, 2)
    own = torch.arange(heads, device=output.device).view(-1, 1, 1, 1) % group
    return output.gather(3, own.expand(*output.shape[:3], 1, count)).squeeze(3)
