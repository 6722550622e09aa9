"""A bias of a padded batch, for its sequences packed into one row."""

from __future__ import annotations

from torch import Tensor, nn

from clearhead.base.ragged import Sequences
from clearhead.base.shapes import Sizes, extent
from clearhead.biases.base import Added, Bias, Far, lowered, wide


class RaggedBias(Bias):
    """A bias of a padded batch, for the packed row of its sequences."""

    def __init__(self, bias: Bias, sequences: Sequences) -> None:
        super().__init__()
        self.bias, self.sequences = bias, sequences

    @classmethod
    def example(cls, sizes: Sizes) -> Bias:
        return cls(Far(0.3), Sequences.example(sizes))

    def __repr__(self) -> str:
        return f"{self.bias!r} of each of <{len(self.sequences.query_edges)} sequences>"

    def lower(self, sizes: Sizes) -> Added:
        of = self.sequences
        padded = of.padded(sizes)
        added = lowered(self.bias, padded)
        relative = added.relative
        if of.same and added.dense is None and added.function is None and relative is not None and len(relative) == 1:
            # a distance in the packed row is that in the sequence; those beyond the longest sequence are masked
            room = sizes.queries - padded.queries
            return Added(relative=nn.functional.pad(relative, (room, room)))

        def function(batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
            whole = added.tile(slice(0, 0), heads, slice(0, 0), slice(0, 0), padded)
            count = (len(range(*extent(side, size))) for side, size in zip((queries, keys), sizes[2:4], strict=True))
            numbers = wide(whole).new_zeros(1, len(range(*extent(heads, sizes.heads))), *count)
            for number, at, part in of.inside(queries, keys, sizes):
                tile = added.tile(slice(number, number + 1), heads, *part, padded)
                numbers[(slice(None), slice(None), *at)] = wide(tile)
            return numbers

        return Added(function=function, reads=(*added.tensors, *added.reads))
