"""Where the numbers of each head may stand among the rows of a layer that makes them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SIDES = ("query", "key", "value")


def layouts(side: str, out: int, heads: int, key_heads: int, width: int) -> Iterator[Tensor]:
    """The rows (H, E) of a layer of so many, for the heads of a query, a key or a value of this width.

    One layer for each; or one for the three: one behind another (GPT-2), or by heads, or by groups of heads that share
    a key head: its queries, its key, its value (GPT-NeoX, Falcon); or one whose heads have more than this, before it or
    behind it.
    """
    mine = heads if side == "query" else key_heads
    head, entry = torch.arange(mine, device="cpu").unsqueeze(1), torch.arange(width, device="cpu")
    place, group = SIDES.index(side), heads // key_heads
    if out == mine * width:
        yield head * width + entry
    if out == (heads + 2 * key_heads) * width:
        start = 0 if place == 0 else heads + (place - 1) * key_heads
        yield (start + head) * width + entry
        block = group + 2
        if side == "query":
            yield (head // group * block + head % group) * width + entry
        else:
            yield (head * block + group + place - 1) * width + entry
    if out % mine == 0 and out // mine > width:
        block = out // mine
        yield head * block + entry
        yield head * block + block - width + entry
