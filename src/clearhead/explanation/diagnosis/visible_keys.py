"""What a mask allows, looked at a few queries at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from clearhead.problem.problem import Problem

EVERY = slice(None)
PART = 2**24  # pairs at once
WIDE = 64  # queries at once where a band around the diagonal is looked at


def count_visible(problem: Problem) -> Tensor:
    """How many keys each query may see, int64 (B or 1, H or 1, Lq or 1)."""
    spans, keys = problem.spans, problem.sizes.keys
    if spans is None:
        return torch.full((1, 1, 1), keys, device=problem.sizes.device, dtype=torch.int64)
    if spans.residual is None:
        start, stop = spans.intervals()
        return (stop - start).clamp_min(0).sum(-1)
    return torch.cat([keep.sum(-1) for keep in _parts(problem)], -1)


def sees_all(problem: Problem) -> bool:
    """Whether every query may see every key."""
    return bool((count_visible(problem) == problem.sizes.keys).all())


def _parts(problem: Problem) -> Iterator[Tensor]:
    """The mask of some queries at a time, bool (B or 1, H or 1, q, Lk)."""
    spans, (batch, heads, queries, keys) = problem.spans, problem.sizes.shape
    assert spans is not None
    rows = max(1, PART // (batch * heads * keys))
    for row in range(0, queries, rows):
        some = slice(row, min(row + rows, queries))
        keep = spans.keep(EVERY, EVERY, some, EVERY, keys)
        yield keep.expand(-1, -1, some.stop - some.start, -1)


def sees_neighbours(problem: Problem, offset: int) -> tuple[Tensor, Tensor, Tensor]:
    """Whether query i may see the key before its own place, at it, and after it: three bool (B or 1, H or 1, Lq).

    `offset`: the place of query 0 among the keys. A key that is not there is not seen.
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
