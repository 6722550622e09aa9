"""The first and last allowed key of each query."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.problem.problem import Problem
from clearhead.problem.region import EVERY

PART = 2**21  # the most pairs of a residual in memory at once


class Extent(NamedTuple):
    """The first allowed key of each query, one more than its last, and the number of its allowed keys.

    Each is int64 (B or 1, H or 1, Lq or 1). A fully masked row has first = Lk, stop = 0.
    """

    first: Tensor
    stop: Tensor
    allowed: Tensor


def extent(problem: Problem) -> Extent:
    """Compute the extent of the allowed keys of each query; a mask with a residual is read pair by pair."""
    spans, keys = problem.spans, problem.sizes.keys
    if spans is None:
        nothing = torch.zeros((1, 1, 1), device=problem.sizes.device, dtype=torch.int64)
        return Extent(nothing, nothing + keys, nothing + keys)
    if spans.residual is None:
        start, stop = spans.intervals()
        some = stop > start
        return Extent(
            torch.where(some, start, keys).amin(-1), torch.where(some, stop, 0).amax(-1), (stop - start).sum(-1)
        )
    batch, heads, queries, _ = problem.sizes.shape
    rows = max(1, PART // (batch * heads * keys))
    found: Extent | None = None
    for row in range(0, queries, rows):
        part = slice(row, min(row + rows, queries))
        keep = spans.keep(EVERY, EVERY, part, EVERY, keys)
        if found is None:  # allocate once: small results between large temporaries would fragment the memory
            found = Extent(*(keep.new_zeros(*keep.shape[:2], queries, dtype=torch.int64) for _ in range(3)))
        count, bits = keep.sum(-1), keep.to(torch.uint8)
        found.first[..., part] = torch.where(count > 0, bits.argmax(-1), keys)
        found.stop[..., part] = torch.where(count > 0, keys - bits.flip(-1).argmax(-1), 0)
        found.allowed[..., part] = count
    assert found is not None
    return found
