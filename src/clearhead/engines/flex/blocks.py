"""A mask as FlexAttention takes it: for each block of 128 queries, the blocks of 128 keys with allowed pairs.

All of it is computed on the device of the inputs, from the starts and stops of the spans: the host reads no value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.base.shapes import Sizes, unflatten
from clearhead.base.torch_state.mode import Mode
from clearhead.base.user_functions.rules import by_pair
from clearhead.engines.flex import rules
from clearhead.engines.flex.rules import Traced
from clearhead.masks.base import Spans
from clearhead.problem.visible import Visible

BLOCK = 128  # the queries and the keys of a block: FlexAttention's default
STRIP = 2**26  # pairs of a residual in memory at once


class Blocks(NamedTuple):
    """The blocks of a mask, int32; nq and nk are the numbers of blocks of queries and keys.

    B and H are 1 if the mask is the same for all sequences or heads.

    Attributes:
        partial: Blocks with masked pairs: their number in each row of blocks, (B, H, nq), and their indices, (B, H, nq,
            nk), these first.
        full: Blocks whose pairs are all allowed, in the same form.
        partial_by_key: The same by columns, (B, H, nk) and (B, H, nk, nq), for the backward pass.
        full_by_key: The same by columns.
        edges: start and stop, int32 (B or 1, H or 1, Lq or 1), and the starts and stops of gaps, with one more
            dimension.
        keep: The residual in full, bool (B or 1, H or 1, Lq or 1, Lk or 1), if it is no `rule`.
        rule: The residual as a function of one pair.
    """

    partial: tuple[Tensor, Tensor]
    full: tuple[Tensor, Tensor]
    partial_by_key: tuple[Tensor, Tensor]
    full_by_key: tuple[Tensor, Tensor]
    edges: tuple[Tensor, ...]
    keep: Tensor | None
    rule: Traced | None


def blocks_of(visible: Visible, sizes: Sizes, mode: Mode) -> Blocks:
    """Return the blocks of a mask, cached as long as its normal form."""
    if mode.traced:
        return _blocks(visible.spans, sizes, mode)
    return visible.memo.derive("flex", lambda: _blocks(visible.spans, sizes, mode))


def _blocks(spans: Spans, sizes: Sizes, mode: Mode) -> Blocks:
    some, full = _touched(spans, sizes)
    rule = residual_rule(spans, sizes, mode)
    keep = None if rule is None or isinstance(rule, Traced) else spans.rest(*(slice(None),) * 4)
    if rule is not None:
        strips = [keep] if keep is not None else _strips(spans, sizes)
        each = [(_over_blocks(t, False).amax((3, 5)), _over_blocks(t, True).amin((3, 5))) for t in strips]
        any_, all_ = (torch.cat(parts, 2) if len(each) > 1 else parts[0] for parts in zip(*each, strict=True))
        some, full = some & any_, full & all_
    partial = some & ~full
    by_key, full_by_key = (_listed(blocks.transpose(-1, -2)) for blocks in (partial, full))
    edges = tuple(edge.to(torch.int32) for edge in spans.edges())
    traced = rule if isinstance(rule, Traced) else None
    return Blocks(_listed(partial), _listed(full), by_key, full_by_key, edges, keep, traced)


def residual_rule(spans: Spans, sizes: Sizes, mode: Mode) -> Traced | str | None:
    """Return a mask's residual as a function of one pair, or why it is computed in full; None without a residual."""
    if spans.residual is None:
        return None
    found = by_pair(spans.residual)
    if found is None or mode.compiled or mode.traced:
        return "it is known only in parts"
    return rules.traced(found, sizes.device, floating=False)


def _strips(spans: Spans, sizes: Sizes) -> Iterator[Tensor]:
    """Yield the residual for some blocks of queries at a time, bool (B or 1, H or 1, rows, Lk or 1)."""
    rows = max(BLOCK, STRIP // max(1, sizes.batch * sizes.heads * sizes.keys) // BLOCK * BLOCK)
    every = slice(None)
    for top in range(0, sizes.queries, rows):
        strip = spans.rest(every, every, slice(top, min(top + rows, sizes.queries)), every)
        yield strip if rows >= sizes.queries else strip.expand(-1, -1, min(rows, sizes.queries - top), -1)


def _touched(spans: Spans, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Compute which blocks some query's interval touches, and which one interval of all queries covers.

    Both are (B, H, nq, nk). The first may be too many, if the queries of a block attend to different keys, and the
    second too few, if different intervals cover a block: the kernel then tests such a block pair by pair.
    """
    rows = torch.arange(-(-sizes.queries // BLOCK) * BLOCK, device=sizes.device).clamp(max=sizes.queries - 1)
    left = torch.arange(0, sizes.keys, BLOCK, device=sizes.device)
    right = (left + BLOCK).clamp(max=sizes.keys)
    start, stop = spans.intervals()  # (B or 1, H or 1, Lq or 1, n)
    empty = stop <= start
    start, stop = start.masked_fill(empty, sizes.keys), stop.masked_fill(empty, 0)
    if start.shape[2] > 1:  # pad the last block with copies of the last query
        start, stop = (unflatten(edge[:, :, rows], 2, -1, BLOCK) for edge in (start, stop))
    else:
        start, stop = (edge.expand(-1, -1, len(rows) // BLOCK, -1).unsqueeze(3) for edge in (start, stop))
    first, last = start.amin(3).unsqueeze(-1), stop.amax(3).unsqueeze(-1)  # (B, H, nq, n, 1)
    some = (first < right) & (last > left)
    full = (start.amax(3).unsqueeze(-1) <= left) & (stop.amin(3).unsqueeze(-1) >= right)
    return some.any(3), full.any(3)


def _over_blocks(keep: Tensor, beyond: bool) -> Tensor:
    """Reshape a mask (B, H, Lq or 1, Lk or 1) to (B, H, nq or 1, rows, nk or 1, columns), padded with `beyond`."""
    padding = [(-size) % BLOCK if size > 1 else 0 for size in (keep.shape[3], keep.shape[2])]
    whole = F.pad(keep, (0, padding[0], 0, padding[1]), value=beyond)
    columns, rows = (BLOCK if size > 1 else 1 for size in (keep.shape[3], keep.shape[2]))
    return unflatten(unflatten(whole, 3, -1, columns), 2, -1, rows)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of blocks that are set in each row, and the order of blocks with these first."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()
