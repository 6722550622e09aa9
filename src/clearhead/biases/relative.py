"""The learnt relative position bias."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.numbers import check_count, check_flag
from clearhead.base.positions import query_offset
from clearhead.base.shapes import Sizes, no_heads
from clearhead.biases.base import Added, Bias, distances, wide


class RelativeBias(Bias):
    """T5's bias: a learnt number for each head and each bucket of distances.

    >>> import torch, clearhead as ch
    >>> x = torch.rand(2, 8, 10, 16)
    >>> ch.attention(x, x, x, bias=ch.RelativeBias(num_heads=8)).shape
    torch.Size([2, 8, 10, 16])

    Formula: b_hij = weight[bucket(j − i − p), h], where p is the position of query 0. Small distances have a bucket
    each, larger ones share buckets that widen logarithmically up to `max_distance`; beyond it, all share the last.
    `bidirectional`: half of the buckets are for the keys after the query; else these share the query's own bucket.

    `weight`: (num_buckets, num_heads), as T5's `relative_attention_bias.weight`. Where Lq ≠ Lk, `align=` of the call
    says p.
    Raises a `ShapeError` for another number of heads. Cost: O(Lq + Lk) numbers a head.
    Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer".
    """

    positional = True

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
    ) -> None:
        super().__init__()
        least = 4 if bidirectional is not False else 2
        self.num_buckets = check_count(num_buckets, least, "RelativeBias: num_buckets")
        self.max_distance = check_count(max_distance, 1, "RelativeBias: max_distance", most=math.inf)
        self.bidirectional = check_flag(bidirectional, "RelativeBias: bidirectional")
        exact = num_buckets // least
        if self.max_distance <= exact:
            raise ClearheadError(
                f"RelativeBias: max_distance is {max_distance}, and {num_buckets} buckets hold the distances below "
                f"{exact} one by one; pass max_distance above {exact}, or fewer buckets."
            )
        self.weight = nn.Parameter(torch.empty(num_buckets, check_count(num_heads, 1, "RelativeBias: num_heads")))
        nn.init.normal_(self.weight, std=0.02)

    @classmethod
    def example(cls, sizes: Sizes) -> Bias:
        return cls(sizes.heads, num_buckets=8, max_distance=20)

    def lower(self, sizes: Sizes) -> Added:
        if sizes.heads != self.weight.shape[1]:
            raise ShapeError(
                f"RelativeBias has {self.weight.shape[1]} heads and the scores have {sizes.heads}, "
                f"{(*sizes.shown, sizes.queries, sizes.keys)}; pass RelativeBias({sizes.heads})." + no_heads(sizes)
            )
        apart = distances(sizes, query_offset(sizes, "RelativeBias"))
        # one row a distance: the gradient is a sum over distances, in a fixed order
        return Added(relative=F.embedding(self.bucket(apart), wide(self.weight)).transpose(-1, -2))

    def bucket(self, apart: Tensor) -> Tensor:
        """The bucket of each distance (key position less query position)."""
        buckets, after = self.num_buckets, torch.zeros_like(apart)
        if self.bidirectional:
            buckets //= 2
            after = (apart > 0) * buckets
            far = apart.abs()
        else:
            far = (-apart).clamp(min=0)
        exact = buckets // 2
        growth = torch.log(far.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        wide = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
        return after + torch.where(far < exact, far, wide)

    def extra_repr(self) -> str:
        shown: dict[str, Any] = {"num_buckets": self.num_buckets, "max_distance": self.max_distance}
        return f"{self.weight.shape[1]}, " + ", ".join(f"{n}={v}" for n, v in shown.items())
