"""The key blocks of each block of queries, computed on the device without a synchronization.

A query has up to four intervals, and a block of queries as many ranges of key blocks: the hull of each interval over
its queries, in order, minus the ranges before it. So a key block is in at most one range.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.problem.problem import Problem
from clearhead.problem.visible import Visible

BIG = 2**31 - 1


def ranges(problem: Problem, queries: int, keys: int) -> Tensor | None:
    """Return the first and last + 1 of each range, cached with the mask.

    They are int32 (B or 1, H or 1, blocks, intervals, 2).
    """
    visible = problem.visible
    if visible is None:
        return None
    length = problem.sizes.queries
    return visible.memo.derive(("triton", queries, keys), lambda: _ranges(visible, length, queries, keys))


def _ranges(visible: Visible, length: int, queries: int, keys: int) -> Tensor:
    start, stop = (edge.expand(*edge.shape[:2], length, -1) for edge in visible.spans.intervals())
    some = stop > start
    # (B or 1, H or 1, blocks, queries of a block, intervals); rows beyond the last query are empty
    low = _in_blocks(torch.where(some, start, BIG), queries, BIG).amin(-2)
    high = _in_blocks(torch.where(some, stop, 0), queries, 0).amax(-2)
    first, order = (low // keys).sort(-1)
    last = ((high + keys - 1) // keys).gather(-1, order)
    reached = last.cummax(-1).values
    before = F.pad(reached[..., :-1], (1, 0))
    first = torch.maximum(first, before)
    return torch.stack([first, torch.maximum(first, last)], -1).to(torch.int32).contiguous()


def _in_blocks(edges: Tensor, rows: int, fill: int) -> Tensor:
    """Reshape rows (B, H, L, n) to blocks (B, H, blocks, rows, n)."""
    blocks = -(-edges.shape[2] // rows)
    padded = F.pad(edges, (0, 0, 0, blocks * rows - edges.shape[2]), value=fill)
    return padded.reshape(*edges.shape[:2], blocks, rows, edges.shape[-1])
