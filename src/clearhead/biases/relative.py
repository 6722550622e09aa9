"""The learnt relative position bias."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.base.arrays import check_memory
from clearhead.base.errors import ClearheadError
from clearhead.base.numbers import MOST, check_count, check_flag
from clearhead.base.positions import positions, query_offset
from clearhead.base.shapes import Sides, Sizes
from clearhead.base.symbolic.steps import PAIRS, Step, made
from clearhead.biases.base import Added, Bias, check_heads, distances, wide


class RelativeBias(Bias):
    """T5's bias: a learnt number for each head and each bucket of distances.

    >>> import torch, clearhead as ch
    >>> x = torch.rand(2, 8, 10, 16)
    >>> ch.attention(x, x, x, bias=ch.RelativeBias(num_heads=8)).shape
    torch.Size([2, 8, 10, 16])

    Formula: b_hij = weight[bucket(j − i − p), h], where p is the position of query 0. Small distances have a bucket
    each, larger distances share buckets that widen logarithmically up to `max_distance`; beyond it, all share the last
    bucket.
    `bidirectional`: half of the buckets are for the keys after the query; otherwise these keys share the query's own
    bucket.

    `weight`: (num_buckets, num_heads), as T5's `relative_attention_bias.weight`. Where Lq ≠ Lk, `align=` of the call
    says p. `device`, `dtype`: those of the weight; None is the default of PyTorch.
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
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
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
        heads = check_count(num_heads, 1, "RelativeBias: num_heads")
        self.weight = nn.Parameter(torch.empty(num_buckets, heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew: normal, of standard deviation 0.02."""
        nn.init.normal_(self.weight, std=0.02)

    @classmethod
    def example(cls, sizes: Sizes) -> Bias:
        return cls(sizes.heads, num_buckets=8, max_distance=20)

    def steps(self, sizes: Sizes, at: Sides, name: str = "bias") -> list[Step]:
        rows, columns = positions(sizes, at, name, "RelativeBias")
        why = (
            "How far the key stands after the query; where it stands before it, below 0. The column and the row "
            "broadcast to a matrix."
        )
        apart = made(f"{name}_apart", why, columns - rows, PAIRS)
        weight = wide(self.weight)[:, at[1]].T[None, :, None]
        why = "Learnt: one number for each bucket, in each head."
        table = Step(f"{name}_table", why, weight, (*PAIRS[:2], "1", "bucket"))
        buckets = self._bucket_steps(apart, name)
        why = "Each pair gets the number of its place in the table."
        numbers = made(name, why, table.take_along_dim(buckets[-1], -1), PAIRS)
        return [rows, columns, apart, *buckets, table, numbers]

    def _bucket_steps(self, apart: Step, name: str) -> list[Step]:
        """From the distances to their buckets."""
        half, exact, buckets = self._sides()
        if self.bidirectional:
            far = made(f"{name}_far", "How many places lie between the two, on either side.", apart.abs())
        else:
            why = "How far the key stands before the query; the keys after it share the query's own bucket."
            far = made(f"{name}_far", why, (-apart).masked_fill(apart > 0, 0))
        least = self._edges(apart.value.device)
        widening = (
            f"The least distance of each bucket but bucket 0. Each distance below {exact} has its own; then buckets "
            f"widen: distance d is in bucket {exact} + {buckets - exact} · log(d / {exact}) / "
            f"log({self.max_distance} / {exact}), rounded down, and in {buckets - 1} at most."
        )
        most = min(self.max_distance, 2 * MOST)
        edges = Step(f"{name}_edges", widening, least, ("edge",), within=(0, most))
        count = (far.unsqueeze(-1) >= edges).sum(-1)
        why = "Near distances have a bucket each, and far ones share them."
        if half:
            count = count + half * (apart > 0)
            why += f" The keys after the query have buckets of their own, from {half} on."
        return [far, edges, made(f"{name}_buckets", why, count)]

    def lower(self, sizes: Sizes) -> Added:
        check_heads(self, self.weight.shape[1], sizes)
        apart = distances(sizes, query_offset(sizes, "RelativeBias"))
        weight = wide(check_memory(self.weight, "RelativeBias: weight"))
        # one row a distance: the gradient is a sum over distances, in a fixed order
        # second derivatives of PyTorch's embedding fail where it looks up nothing
        none = weight[:0].reshape(*apart.shape, sizes.heads) if not apart.numel() else None
        rows = F.embedding(self.bucket(apart), weight) if none is None else none
        return Added(relative=rows.transpose(-1, -2))

    def bucket(self, apart: Tensor) -> Tensor:
        """The bucket of each distance (key position less query position)."""
        half, exact, buckets = self._sides()
        far = apart.abs() if self.bidirectional else (-apart).clamp(min=0)
        growth = torch.log(far.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        wide = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
        return (apart > 0) * half + torch.where(far < exact, far, wide)

    def _sides(self) -> tuple[int, int, int]:
        """The first bucket of the keys after the query, the distances with a bucket each, and the buckets of one side.
        The first is 0 where the keys after the query have no buckets of their own."""
        buckets = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        return buckets * self.bidirectional, buckets // 2, buckets

    def _edges(self, device: torch.device) -> Tensor:
        """The least distance of each bucket of one side but the first, as `bucket` has it: found by halving."""
        numbers = torch.arange(1, self._sides()[2], device=device)
        low, high = torch.zeros_like(numbers), torch.full_like(numbers, min(self.max_distance, 2 * MOST))
        while bool((high - low > 1).any()):
            middle = (low + high) // 2
            reached = self.bucket(-middle) >= numbers
            low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
        return high

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, num_buckets={self.num_buckets}, max_distance={self.max_distance}"
