"""A bias that counts positions inside each document."""

from __future__ import annotations

from torch import Tensor, nn

from clearhead.base.document_edges import DocumentEdges
from clearhead.base.shapes import Sizes
from clearhead.biases.base import Added, Bias, Far, lowered, wide


class BiasInDocuments(Bias):
    """A bias of the padded batch that has one sequence for each document, for the row of the documents."""

    def __init__(self, bias: Bias, edges: DocumentEdges) -> None:
        super().__init__()
        self.bias, self.edges, self.positional = bias, edges, bias.positional

    @classmethod
    def example(cls, sizes: Sizes) -> Bias:
        return cls(Far(0.3), DocumentEdges.example(sizes))

    def __repr__(self) -> str:
        return f"{self.bias!r} in each of <{len(self.edges.queries.lengths)} documents>"

    def lower(self, sizes: Sizes) -> Added:
        padded = self.edges.pad_sizes(sizes, (lambda: type(self.bias).__name__) if self.positional else None)
        added = lowered(self.bias, padded)
        relative, reads = added.relative, (*added.tensors, *added.reads)
        alone = added.dense is None and added.function is None
        if relative is not None and alone and self.edges.same and len(relative) == 1:
            # a distance in the row is that in the document; longer ones than the longest document's are masked
            room = sizes.queries - padded.queries
            return Added(relative=nn.functional.pad(relative, (room, room)))

        def compute_tile(batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
            return wide(added.tile(batch, heads, queries, keys, padded))

        part = compute_tile if added.function is None or added.tensors else added.function
        return Added(function=self.edges.to_row(part, sizes), reads=reads)
