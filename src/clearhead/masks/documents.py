"""Packed documents."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError, ShapeError, columns
from clearhead.base.positions import Align, check_align, query_offset, say_align
from clearhead.base.shapes import Sizes, part, placed
from clearhead.base.tracing import empty_of_values, readable
from clearhead.masks._lengths import as_tensor, check_lengths
from clearhead.masks.base import Mask, Spans


class Documents(Mask):
    """Each query sees the keys of its own document: sequences packed one after the other.

    >>> import torch, clearhead as ch
    >>> ch.Causal() & ch.Documents.from_lengths([2, 3])
    Causal() & Documents(<5>)
    ■ · · · ·
    ■ ■ · · ·
    · · ■ · ·
    · · ■ ■ ·
    · · ■ ■ ■

    Rule: query i sees the keys j with ids[j] = ids[i + p], where p is the position of query 0; none, where i + p is no
    key's position.
    `ids`: integers (Lk,) or (B, Lk), a list, array or tensor: each key's document. A document is an interval where its
    keys stand together; ids that recur apart work too, at the cost of a comparison a pair.
    `align`: as for `Causal`, needed where Lq ≠ Lk.
    Raises a `ClearheadError` for other dtypes and shapes. Cost: O(Lk log Lk).
    """

    def __init__(self, ids: Any, align: Align = None) -> None:
        ids = as_tensor(ids, "Documents: ids")
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or not 1 <= ids.ndim <= 2:
            raise ClearheadError(
                f"Documents: ids has dtype {ids.dtype}, shape {tuple(ids.shape)}; expected integers (Lk,) or (B, Lk), "
                "one for each key. For the documents' lengths use Documents.from_lengths(lengths)."
            )
        self.ids: Tensor = ids.detach().long().clone()
        self.align = check_align(align, "Documents")
        self.first, self.last, together = _extents(_rows(self.ids))
        self.together = readable(together) and bool(together)

    @classmethod
    def from_lengths(cls, lengths: Any, align: Align = None) -> Documents:
        """Documents of these lengths, one after the other: whole numbers (n,), a list, array or tensor.

        Its size depends on their values: make it outside of code that is compiled.
        """
        lengths = check_lengths(lengths, "Documents: lengths")
        if empty_of_values(lengths):
            raise ClearheadError(
                "Documents: lengths has a shape alone (meta or fake), and the size depends on its values."
            )
        if lengths.ndim != 1:
            raise ShapeError(
                f"Documents: lengths has shape {tuple(lengths.shape)}; expected (n,). For a batch of different "
                "packings pass ids, (B, Lk)."
            )
        return cls(torch.arange(lengths.shape[0], device=lengths.device).repeat_interleave(lengths), align)

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        places = torch.arange(sizes.keys, device=sizes.device)
        ids = (places[None] + torch.arange(sizes.batch, device=sizes.device)[:, None]) // 3 % 4  # some recur
        return cls(ids, align="lower_right")

    def title(self) -> str:
        align = "" if self.align is None else f", align={say_align(self.align)}"
        return f"Documents(<{'×'.join(map(str, self.ids.shape))}>{align})"

    def offsets(self, sizes: Sizes) -> list[tuple[str, int | Tensor]]:
        return [("Documents", query_offset(self.align, sizes, "Documents"))]

    def signature(self) -> Hashable | None:
        if isinstance(self.align, Tensor) or self.ids.numel() > 64 or not readable(self.ids):
            return None
        return (type(self), self.align, tuple(self.ids.shape), *self.ids.flatten().tolist())

    def drawn(self) -> Sizes:
        batch = self.ids.shape[0] if self.ids.ndim == 2 else 1
        if isinstance(self.align, Tensor):
            batch = max(batch, self.align.numel())
        return Sizes(batch, 1, self.ids.shape[-1], self.ids.shape[-1])

    def lower(self, sizes: Sizes) -> Spans:
        if self.ids.shape[-1] != sizes.keys or (self.ids.ndim == 2 and self.ids.shape[0] not in (1, sizes.batch)):
            raise ShapeError(
                f"Documents: ids has shape {tuple(self.ids.shape)}; expected (Lk,) = ({sizes.keys},) or (B, Lk) = "
                f"({sizes.batch}, {sizes.keys}).\n"
                + columns({"scores": (*sizes.shown, sizes.queries, sizes.keys), "ids": tuple(self.ids.shape)})
            )
        offset = query_offset(self.align, sizes, "Documents")
        own = torch.arange(sizes.queries, device=sizes.device).view(1, 1, -1) + offset  # (B or 1, 1, Lq)
        inside = (own >= 0) & (own < sizes.keys)
        ids, first, last = (_rows(placed(t, sizes.device, "Documents: ids")) for t in (self.ids, self.first, self.last))
        if not sizes.keys:
            return Spans(torch.zeros_like(own), torch.zeros_like(own))
        batch = own.shape[0] if ids.shape[0] == 1 else ids.shape[0]
        at = own[:, 0].clamp(0, sizes.keys - 1).expand(batch, -1)
        mine, start, stop = (t.expand(batch, -1).gather(1, at).unsqueeze(1) for t in (ids, first, last + 1))
        start, stop = torch.where(inside, start, 0), torch.where(inside, stop, 0)
        if self.together:
            return Spans(start, stop)

        def residual(batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
            rows = part(mine, batch, slice(None), queries).unsqueeze(-1)
            return rows == part(ids, batch)[:, None, None, keys]

        return Spans(start, stop, residual)


def _rows(ids: Tensor) -> Tensor:
    return ids if ids.ndim == 2 else ids[None]


def _extents(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each key the first and the last key of its document, (B, L), and whether all documents stand together."""
    length = ids.shape[1]
    order = ids.argsort(dim=1, stable=True)  # documents together, each in the order of its keys
    ordered = ids.gather(1, order)
    change = ordered[:, 1:] != ordered[:, :-1]
    edge = torch.ones_like(ordered[:, :1], dtype=torch.bool)
    begins, ends = torch.cat([edge, change], 1), torch.cat([change, edge], 1)
    places = torch.arange(length, device=ids.device).expand_as(ids)
    begin = torch.where(begins, places, 0).cummax(1).values if length else places
    end = torch.where(ends, places, length).flip(1).cummin(1).values.flip(1) if length else places
    first, last = order.gather(1, begin), order.gather(1, end)
    together = (last - first == end - begin).all()
    back = order.argsort(dim=1)
    return first.gather(1, back), last.gather(1, back), together
