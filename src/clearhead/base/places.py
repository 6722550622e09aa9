"""The positions of queries and keys as steps of an explanation: of masks, and of biases."""

from __future__ import annotations

import torch

from clearhead.base.positions import query_offset
from clearhead.base.shapes import Sides, Sizes, part
from clearhead.base.steps import PAIRS, Step


def positions(sizes: Sizes, at: Sides, name: str, who: str) -> tuple[Step, Step]:
    """The positions of the queries as a column, `{name}_queries`, and of the keys as a row, `{name}_keys`.

    `who` is named in the error where the call gives no alignment.
    """
    own = torch.arange(sizes.queries, device=sizes.device).view(1, 1, -1) + query_offset(sizes, who)
    rows = part(own, *at[:3]).unsqueeze(-1)
    of_queries = "The position of each query among the keys, from 0 on: a column, (…, 1)."
    return Step(f"{name}_queries", of_queries, rows, (*PAIRS[:3], "1")), key_positions(sizes, at, f"{name}_keys")


def key_positions(sizes: Sizes, at: Sides, name: str) -> Step:
    """The row of the keys' positions."""
    columns, most = torch.arange(sizes.keys, device=sizes.device)[at[3]], max(sizes.keys - 1, 0)
    return Step(name, "The position of each key, from 0 on: a row.", columns, ("Lk",), within=(0, most))
