"""The keys that a mask allows, computed a few queries at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.problem.problem import Problem

EVERY = slice(None)
PART = 2**21  # the most pairs at once
WIDE = 64  # queries at once where a band around the diagonal is looked at


class Extent(NamedTuple):
    """For each query its first key, one more than its last key, and how many keys it may see.

    Each is int64 (B or 1, H or 1, Lq or 1). A query that sees nothing has first = Lk, stop = 0.
    """

    first: Tensor
    stop: Tensor
    allowed: Tensor


def extent(problem: Problem) -> Extent:
    """The extent of the keys that each query may see. A mask without intervals is read pair by pair."""
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
        if found is None:  # written to part by part: small results between large ones would scatter the memory
            found = Extent(*(keep.new_zeros(*keep.shape[:2], queries, dtype=torch.int64) for _ in range(3)))
        for whole, values in zip(found, _of_matrix(keep, keys), strict=True):
            whole[..., part] = values
    assert found is not None
    return found


def _of_matrix(keep: Tensor, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first, stop and count of the rows of a bool matrix."""
    count, bits = keep.sum(-1), keep.contiguous().view(torch.uint8)
    first = torch.where(count > 0, bits.argmax(-1), keys)
    return first, torch.where(count > 0, keys - bits.flip(-1).argmax(-1), 0), count


def sees_neighbours(problem: Problem, offset: int) -> tuple[Tensor, Tensor, Tensor]:
    """Whether query i may see the key before its own place, at it, and after it: three bool (B or 1, H or 1, Lq).

    `offset`: the place of query 0 among the keys. A place without a key is not seen.
    """
    spans, (_, _, queries, keys) = problem.spans, problem.sizes.shape
    assert spans is not None
    found: list[list[Tensor]] = [[], [], []]
    for row in range(0, queries, WIDE):
        last = min(row + WIDE, queries)
        first = min(max(row + offset - 1, 0), keys)
        columns = slice(first, max(first, min(last + offset + 1, keys)))
        keep = spans.keep(EVERY, EVERY, slice(row, last), columns, keys)
        keep = keep.expand(-1, -1, last - row, -1)
        place = torch.arange(row, last, device=keep.device) + offset - first
        for number, seen in enumerate(found):
            at = place + number - 1
            there = (at >= 0) & (at < keep.shape[-1])
            if not keep.shape[-1]:
                seen.append(there.expand(keep.shape[:-1]))
                continue
            index = at.clamp(0, keep.shape[-1] - 1)[:, None].expand(*keep.shape[:2], -1, 1)
            seen.append(keep.gather(-1, index).squeeze(-1) & there)
    before, own, after = (torch.cat(parts, -1) for parts in found)
    return before, own, after
