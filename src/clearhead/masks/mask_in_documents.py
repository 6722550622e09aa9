"""A mask that counts positions inside the documents of a packed row."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from clearhead.base.document_edges import DocumentEdges
from clearhead.base.errors import ClearheadError
from clearhead.base.output.text import short
from clearhead.base.shapes import Sizes, moved
from clearhead.masks.base import Mask, Sides, Spans, map_edges
from clearhead.masks.first_keys import FirstKeys


class MaskInDocuments(Mask):
    """A mask for packed documents, from the mask of the padded batch that has one sequence for each document."""

    _document_edges: DocumentEdges

    def __init__(self, mask: Mask, edges: DocumentEdges) -> None:
        self.mask, self._document_edges, self.positional = mask, edges, mask.positional

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls(FirstKeys(max(sizes.keys // 4, 1)), DocumentEdges.example(sizes))

    def signature(self) -> Hashable | None:
        signature = self.mask.signature()
        return None if signature is None else (type(self), signature, self._document_edges.numbers)

    def depends(self) -> tuple[Tensor, ...] | None:
        return self.mask.depends()

    def _list_notes(self) -> list[str]:
        return self.mask._list_notes()

    def title(self) -> str:
        return f"({self.mask.title()})" if self.mask._is_pair else self.mask.title()

    def drawn(self) -> Sizes:
        return Sizes(1, 1, self._document_edges.queries.total, self._document_edges.keys.total)

    def _pad_sizes(self, sizes: Sizes) -> Sizes:
        return self._document_edges.pad_sizes(sizes, self.mask.title if self.positional else None)

    def _compute_part(self, sizes: Sizes, at: Sides) -> Tensor:
        padded = self._pad_sizes(sizes)
        return self._document_edges.to_row(lambda *own: self.mask._compute_part(padded, own), sizes)(*at)

    def lower(self, sizes: Sizes) -> Spans:
        edges = self._document_edges
        padded = self._pad_sizes(sizes)
        document, index = edges.queries.locate(sizes.device)
        sums = moved(edges.keys.sums, sizes.device)
        first, stop = sums[document], sums[document + 1]
        if not sizes.queries or not sizes.keys:
            return Spans(first.view(1, 1, -1), stop.view(1, 1, -1))
        spans = self.mask._resolve(padded)

        def to_row(edge: Tensor) -> Tensor:
            batch, _, length, *_ = edge.shape
            own = edge[document if batch > 1 else document * 0, :, index if length > 1 else index * 0]  # (T, H or 1, …)
            low, high = (bound.view(-1, *(1,) * (own.ndim - 1)) for bound in (first, stop))
            return torch.minimum(low + own.clamp(min=0), high).transpose(0, 1)[None]

        residual = None if spans.residual is None else edges.to_row(spans.rest, sizes)
        return map_edges(spans, to_row)._replace(residual=residual)


def count_in_documents(mask: Mask, edges: DocumentEdges) -> Mask:
    """Return a side of `&` or `|` that counts positions inside documents with these edges."""
    if mask._document_edges is None:
        return MaskInDocuments(mask, edges)
    if mask._document_edges.numbers == edges.numbers:
        return mask
    raise ClearheadError(
        f"{short(mask.title(), 200)} has other documents than the mask beside it; expected one set of documents.\nPass "
        "the edges of their common parts to one Documents.from_cu_seqlens(cu_q, cu_k)."
    )
