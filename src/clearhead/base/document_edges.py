"""The edges of documents that stand one after the other in a row, without padding."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.positions import query_offset
from clearhead.base.shapes import Align, Sizes, extent, moved
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.user_functions.rules import ByPair, by_pair

Part = Callable[[slice, slice, slice, slice], Tensor]


class RowEdges:
    """Where the documents of one row begin and end, on the host.

    Args:
        sums: The sums of the documents' lengths, int64 (n + 1,); 0 first.
    """

    def __init__(self, sums: Tensor) -> None:
        self.numbers = tuple(sums.tolist())
        self.sums = torch.tensor(self.numbers, dtype=torch.int64, device="cpu")
        self.lengths = self.sums.diff()
        self.longest = max([0, *(stop - start for start, stop in pairwise(self.numbers))])
        self.total = self.numbers[-1]
        self.document = torch.arange(len(self.lengths), device="cpu").repeat_interleave(self.lengths)
        self.index = torch.arange(self.total, device="cpu") - self.sums[self.document]

    def locate(self, device: torch.device, at: Any = slice(None)) -> tuple[Tensor, Tensor]:
        """Return the document of each of these positions in the row, and its index in the document."""
        return moved(self.document, device)[at], moved(self.index, device)[at]

    def pad(self, row: Tensor) -> Tensor:
        """Return the documents of a row (1, [H,] T, E) as a padded batch (n, [H,] L, E), with zeros behind them."""
        sums, lengths = moved(self.sums, row.device), moved(self.lengths, row.device)
        index = torch.arange(self.longest, device=row.device)
        at = torch.where(index < lengths[:, None], sums[:-1, None] + index, self.total)
        return nn.functional.pad(row, (0, 0, 0, 1))[0][..., at, :].movedim(-3, 0)

    def pack(self, batch: Tensor) -> Tensor:
        """Return the documents of a padded batch (n, [H,] L, E) as a row (1, [H,] T, E)."""
        document, index = self.locate(batch.device)
        return batch.movedim(-2, 1)[document, index].movedim(0, -2)[None]


class DocumentEdges:
    """The edges of documents among the queries and among the keys of a call.

    Masks and biases beside them are those of the padded batch that has one sequence for each document.

    Args:
        queries, keys: The sums of the documents' lengths, (n + 1,); 0 first.
        nested: Whether the documents are the sequences of nested tensors.
    """

    def __init__(self, queries: Tensor, keys: Tensor, nested: bool = False) -> None:
        self.queries = RowEdges(queries)
        self.keys = self.queries if keys is queries else RowEdges(keys)
        self.numbers = self.queries.numbers, self.keys.numbers
        self.same = self.numbers[0] == self.numbers[1]
        self.nested = nested

    @classmethod
    def example(cls, sizes: Sizes) -> DocumentEdges:
        """Return three documents of these queries and keys, of which the second may have no query."""
        edges = ((0, n // 3, n // 3 if n == sizes.queries else n // 2, n) for n in sizes[2:4])
        queries, keys = (torch.tensor(edge, device="cpu") for edge in edges)
        return cls(queries, keys)

    def validate_sizes(self, sizes: Sizes) -> None:
        """Raise where a call has other numbers of queries or keys.

        Raises:
            ShapeError: If the last edge is not the number of queries, or of keys.
        """
        if (self.queries.total, self.keys.total) != (sizes.queries, sizes.keys):
            raise ShapeError(
                f"Documents: cu_q ends at {self.queries.total} and cu_k at {self.keys.total}, and there are "
                f"{sizes.queries} queries and {sizes.keys} keys, {(*sizes.shown, sizes.queries, sizes.keys)}."
            )

    def align_each(self, align: Align) -> Align:
        """Return the alignment of each sequence of the padded batch, from that of the call."""
        lower_right = isinstance(align, str) and align == "lower_right"
        return self.keys.lengths - self.queries.lengths if lower_right and not self.same else align

    def pad_sizes(self, sizes: Sizes, who: Callable[[], str] | None = None) -> Sizes:
        """Return the sizes of the padded batch for a row of these sizes.

        Args:
            sizes: The sizes of the row.
            who: Names the mask, bias or statistic in an error; None where it does not depend on positions.

        Raises:
            ShapeError: If the row has other numbers of queries or keys.
            ClearheadError: If positions depend on an alignment, and there is none.
        """
        self.validate_sizes(sizes)
        if sizes.align is None and not self.same and who is not None:
            raise ClearheadError(
                f"{who()} depends on positions, and a document's queries and keys differ in number. Pass "
                'align="upper_left" (query 0 of each document stands at its key 0) or align="lower_right" (the last '
                "query of each stands at its last key: flash-attn's, and that of a key/value cache)."
            )
        count, longest = len(self.queries.lengths), (self.queries.longest, self.keys.longest)
        leading = (count, sizes.heads) if sizes.has_heads else (count,)
        return Sizes(count, sizes.heads, *longest, sizes.device, leading, self.align_each(sizes.align))

    def count_keys(self, device: torch.device) -> Tensor:
        """Return the keys of each query of the padded batch, (n, Lq): 0 beyond a sequence's queries."""
        inside = torch.arange(self.queries.longest, device="cpu") < self.queries.lengths[:, None]
        return (inside * self.keys.lengths[:, None]).to(device)

    def compute_offsets(self, sizes: Sizes, who: str) -> Tensor:
        """Return the position of each query among the keys of the row, less its index: (1, 1, Lq)."""
        offset = query_offset(self.pad_sizes(sizes, lambda: who), who)
        document, _ = self.queries.locate(sizes.device)
        if isinstance(offset, Tensor):
            offset = offset.flatten()[document * (offset.numel() > 1)]
        return (moved(self.keys.sums - self.queries.sums, sizes.device)[document] + offset).view(1, 1, -1)

    def to_row(self, part: Part, sizes: Sizes) -> Part:
        """Turn a function of parts of the padded batch into one of parts of the row; other pairs get 0."""

        def fill_row(batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
            tiles = []
            asked = [range(*extent(side, size)) for side, size in zip((queries, keys), sizes[2:4], strict=True)]
            first, last = 0, len(self.numbers[0]) - 1
            if not get_mode().compiled:  # the compiler cannot trace bisect
                first = max(bisect_right(sums, side.start) for side, sums in zip(asked, self.numbers, strict=True)) - 1
                last = min(bisect_left(sums, side.stop) for side, sums in zip(asked, self.numbers, strict=True))
            for n in range(first, last):
                edges = [sums[n : n + 2] for sums in self.numbers]
                both = [_intersect(*side) for side in zip(asked, edges, strict=True)]
                if None not in both:
                    at, own = zip(*both, strict=True)
                    tiles.append((at, part(slice(n, n + 1), heads, *own)))
            like = tiles[0][1] if tiles else part(slice(0, 0), heads, slice(0, 0), slice(0, 0))
            found = like.new_zeros(1, len(range(*extent(heads, sizes.heads))), *map(len, asked))
            for at, tile in tiles:
                found[(slice(None), slice(None), *at)] = tile
            return found

        rule = by_pair(part)
        if rule is None:
            return fill_row
        (document, row), (_, column) = self.queries.locate(sizes.device), self.keys.locate(sizes.device)

        def evaluate_pair(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return rule.at(document[query], head, row[query], column[key])

        return ByPair(fill_row, evaluate_pair, rule.of)


def _intersect(every: range, edge: tuple[int, ...]) -> tuple[slice, slice] | None:
    """Return the positions that lie in a document, as a part of `every` and as a part of the document."""
    first = max(0, -((every.start - edge[0]) // every.step))
    last = min(len(every), -((every.start - edge[1]) // every.step))
    if first >= last:
        return None
    begin = every[first] - edge[0]
    return slice(first, last), slice(begin, every[last - 1] - edge[0] + 1, every.step)
