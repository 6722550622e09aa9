"""A mask of a padded batch, for its sequences packed into one row."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.base.ragged import Sequences, places_in
from clearhead.base.shapes import Sizes, extent
from clearhead.masks.base import Between, Mask, Spans, check_spans


class RaggedMask(Mask):
    """Each query of a packed row sees the keys of its own sequence that the mask of the padded batch allows."""

    def __init__(self, mask: Mask | None, sequences: Sequences) -> None:
        self.mask, self.sequences = mask, sequences

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        sequences = Sequences.example(sizes)
        keys = sequences.padded(sizes).keys
        return cls(Between(min(1, keys), keys), sequences)

    def title(self) -> str:
        count = len(self.sequences.query_edges)
        return f"<{count} sequences>" if self.mask is None else f"{self.mask.title()} of each of <{count} sequences>"

    def drawn(self) -> Sizes:
        queries, keys = self.sequences.query_edges[-1:], self.sequences.key_edges[-1:]
        return Sizes(1, 1, queries[0][1] if queries else 0, keys[0][1] if keys else 0)

    def lower(self, sizes: Sizes) -> Spans:
        of = self.sequences
        queries, keys = of.queries.to(sizes.device), of.keys.to(sizes.device)
        number, place = places_in(queries, torch.arange(sizes.queries, device=sizes.device))
        first, stop = keys[number], keys[number + 1]
        if self.mask is None or not sizes.queries or not sizes.keys:
            return Spans(first.view(1, 1, -1), stop.view(1, 1, -1))
        padded = of.padded(sizes)
        spans = check_spans(self.mask.lower(padded), padded, self.mask)

        def moved(edge: Tensor) -> Tensor:
            batch, _, length, *_ = edge.shape
            own = edge[number if batch > 1 else number * 0, :, place if length > 1 else place * 0]  # (T, H or 1, ...)
            low, high = (bound.view(-1, *(1,) * (own.ndim - 1)) for bound in (first, stop))
            return torch.minimum(low + own.clamp(min=0), high).transpose(0, 1)[None]

        gaps = None if spans.gaps is None else (moved(spans.gaps[0]), moved(spans.gaps[1]))
        if spans.residual is None:
            return Spans(moved(spans.start), moved(spans.stop), gaps=gaps)

        def residual(batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
            count = (
                len(range(*extent(side, size))) for side, size in zip((heads, queries, keys), sizes[1:4], strict=True)
            )
            keep = torch.zeros(1, *count, dtype=torch.bool, device=sizes.device)
            for number, at, part in of.inside(queries, keys, sizes):
                keep[(slice(None), slice(None), *at)] = spans.rest(slice(number, number + 1), heads, *part)
            return keep

        return Spans(moved(spans.start), moved(spans.stop), residual, spans.reads, gaps)
