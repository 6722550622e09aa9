"""The causal mask."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from clearhead.base.positions import query_offset
from clearhead.base.shapes import Sizes, part
from clearhead.base.steps import Step
from clearhead.masks.base import PAIRS, Mask, Sides, Spans


class Causal(Mask):
    """Each query sees the keys up to its own position.

    >>> import clearhead as ch
    >>> ch.Causal()
    Causal()
    ■ · · · · ·
    ■ ■ · · · ·
    ■ ■ ■ · · ·
    ■ ■ ■ ■ · ·
    ■ ■ ■ ■ ■ ·
    ■ ■ ■ ■ ■ ■

    Rule: query i sees the keys j ≤ i + p, where p is the position of query 0, given by `align=` of the call, which is
    required where Lq ≠ Lk. Cost: O(Lq). Raises a `ClearheadError` where it is missing.
    """

    positional = True

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls()

    def signature(self) -> Hashable | None:
        return type(self)

    def steps(self, sizes: Sizes, at: Sides, name: str = "mask") -> list[Step]:
        own = torch.arange(sizes.queries, device=sizes.device).view(1, 1, -1) + query_offset(sizes, "Causal")
        rows = part(own, *at[:3]).unsqueeze(-1)
        columns = torch.arange(sizes.keys, device=sizes.device)[at[3]]
        formula = f"{name} = {name}_keys <= {name}_queries"
        why = "A query may see the keys up to its own place, and none after it: what comes later is not known yet."
        return [
            Step(f"{name}_queries", "", "The place of each query among the keys: a column.", rows, (*PAIRS[:3], "1")),
            Step(f"{name}_keys", "", "The place of each key: a row.", columns, ("Lk",)),
            Step(name, formula, why, columns <= rows, PAIRS, formula),
        ]

    def lower(self, sizes: Sizes) -> Spans:
        own = torch.arange(1, sizes.queries + 1, device=sizes.device).view(1, 1, -1)
        own = own + query_offset(sizes, "Causal")
        return Spans(torch.zeros_like(own[:1, :, :1]), own.clamp(0, sizes.keys))
