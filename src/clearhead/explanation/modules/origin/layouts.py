"""Where the numbers of each head may stand among the rows of a layer that makes them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SIDES = ("query", "key", "value")


def layouts(side: str, out: int, heads: int, key_heads: int, width: int) -> Iterator[Tensor]:
    """The rows (H, E) that may make the heads of a query, a key or a value of this width, in a layer of `out` rows.

    The layer may be for one side; for key and value, one behind the other; or for all three: one behind the other
    (GPT-2), or by head, or by group of heads that share a key head, as queries, key and value (GPT-NeoX, Falcon). Its
    heads may be wider than `width`, with further numbers before or behind. It may make fewer key heads than attention
    is given, each of which is repeated.
    """
    yield from _rows(side, out, heads, key_heads, width)
    for fewer in (n for n in range(key_heads - 1, 0, -1) if key_heads % n == 0):
        times = key_heads // fewer
        if side == "query":
            yield from _together(side, out, heads, fewer, width)
            continue
        for rows in _alone(side, out, fewer, width), _together(side, out, heads, fewer, width):
            for each in rows:
                yield each.repeat_interleave(times, 0)
                yield each.repeat(times, 1)


def _alone(side: str, out: int, mine: int, width: int) -> Iterator[Tensor]:
    """The rows in a layer for one side, or for key and value."""
    rows = torch.arange(mine * width, device="cpu").view(mine, width)
    if out == mine * width:
        yield rows
    if out == 2 * mine * width and side != "query":
        yield rows + (SIDES.index(side) - 1) * mine * width


def _together(side: str, out: int, heads: int, key_heads: int, width: int) -> Iterator[Tensor]:
    """The rows in a layer for query, key and value."""
    if out != (heads + 2 * key_heads) * width or heads % key_heads:
        return
    mine = heads if side == "query" else key_heads
    head, entry = torch.arange(mine, device="cpu").unsqueeze(1), torch.arange(width, device="cpu")
    place, group = SIDES.index(side), heads // key_heads
    start = 0 if place == 0 else heads + (place - 1) * key_heads
    yield (start + head) * width + entry
    block = group + 2
    if side == "query":
        yield (head // group * block + head % group) * width + entry
    else:
        yield (head * block + group + place - 1) * width + entry


def _rows(side: str, out: int, heads: int, key_heads: int, width: int) -> Iterator[Tensor]:
    """The rows in a layer that makes as many heads as attention is given."""
    mine = heads if side == "query" else key_heads
    yield from _alone(side, out, mine, width)
    yield from _together(side, out, heads, key_heads, width)
    head, entry = torch.arange(mine, device="cpu").unsqueeze(1), torch.arange(width, device="cpu")
    if out % mine == 0 and out // mine > width:
        block = out // mine
        yield head * block + entry
        yield head * block + block - width + entry
