"""A mask of one key a query."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clearhead.masks.base import Spans
from clearhead.problem.problem import Problem
from clearhead.problem.visible import Visible, visible

TILE = 2**18  # pairs of a residual at once
ROWS = 256  # and the most queries


def one_key(problem: Problem, keys: Tensor) -> Visible:
    """The same mask, under which each query sees one key at most. `keys`: int64 (B or 1, Lq), −1 for none."""
    spans, keys = problem.spans, keys.unsqueeze(1)
    sees = keys >= 0
    if spans is not None:
        start, stop = spans.intervals()
        sees = sees & ((keys.unsqueeze(-1) >= start) & (keys.unsqueeze(-1) < stop)).any(-1)
        sees = sees if spans.residual is None else sees & _rest(spans, problem, keys[:, 0])
    start = keys.clamp(min=0)
    return visible(Spans(start, start + sees.long()), problem.sizes)


def _rest(spans: Spans, problem: Problem, keys: Tensor) -> Tensor:
    """What the residual says of each query and its key, (B, H, Lq): of small tiles around these pairs."""
    batch, heads, queries, _ = problem.sizes.shape
    found = torch.zeros(batch, heads, queries, dtype=torch.bool, device=keys.device)
    for some in [slice(0, batch)] if len(keys) == 1 else [slice(b, b + 1) for b in range(batch)]:
        rows = max(1, min(ROWS, math.isqrt(TILE // max(heads * (some.stop - some.start), 1))))
        own = keys[some.start if len(keys) > 1 else 0]
        host = own.cpu()
        for row in range(0, queries, rows):
            at, wanted = own[row : row + rows], host[row : row + rows]
            wanted = wanted[wanted >= 0]
            if not len(wanted):
                continue
            low, high = int(wanted.min()), int(wanted.max()) + 1
            sides = some, slice(0, heads), slice(row, row + len(at)), slice(low, high)
            tile = spans.rest(*sides).expand(some.stop - some.start, heads, len(at), high - low)
            place = (at - low).clamp(0, high - low - 1)[:, None].expand(*tile.shape[:3], 1)
            found[some, :, row : row + rows] = tile.gather(-1, place)[..., 0]
    return found
