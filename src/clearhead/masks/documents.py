"""Packed documents."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.base.arrays import Integers, shown
from clearhead.base.document_edges import DocumentEdges
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.positions import query_offset
from clearhead.base.shapes import Sizes, heads_second, moved, one_or, part, placed
from clearhead.base.symbolic.steps import Step, made
from clearhead.base.torch_state.tensor_kind import has_no_values, is_readable
from clearhead.base.user_functions.rules import ByPair, entry
from clearhead.masks._read import check_integers, check_lengths, derived, few_values, own, signature_of, wrong_shape
from clearhead.masks.base import PAIRS, Mask, Sides, Spans


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

    Rule: query i sees the keys j with ids[j] = ids[i + p], where p is the position of query 0. It sees no key where
    i + p is no key's position.
    `ids`: integers (Lk,) or (B, Lk), a list, array or tensor: each key's document. Documents whose keys stand together
    are intervals; ids that recur apart work too, at the cost of a comparison for each pair. They are copied: later
    writes to `ids` do not change the mask, as they change a `DenseMask` and a `MaskFunction` that reads them.
    `Documents.from_lengths` takes the documents' lengths, `Documents.from_position_ids` the positions inside of them,
    and `Documents.from_cu_seqlens` their edges, which may differ for queries and keys.
    Raises a `ClearheadError` for other dtypes and shapes. Cost: O(Lk log Lk).
    """

    positional = True

    def __init__(self, ids: Integers) -> None:
        expected = "(Lk,) or (B, Lk), one for each key. For the documents' lengths use Documents.from_lengths(lengths)."
        self.ids = own(check_integers(ids, "Documents: ids", (1, 2), expected))
        self._read()  # now, in eager code, so that compiled code finds the result

    @classmethod
    def from_lengths(cls, lengths: Integers) -> Documents:
        """Documents of these lengths, one after the other: whole numbers (n,), a list, array or tensor.

        The mask's size depends on the values of `lengths`: make it outside of compiled code.
        """
        lengths = _with_values(lengths, "lengths")
        return cls(torch.arange(lengths.shape[0], device=lengths.device).repeat_interleave(lengths))

    @classmethod
    def from_cu_seqlens(cls, cu_q: Integers, cu_k: Integers | None = None) -> Documents:
        """Documents by the sums of their lengths, as variable-length kernels take them: whole numbers (n + 1,).

        >>> import torch, clearhead as ch
        >>> documents = ch.Documents.from_cu_seqlens([0, 1, 3], [0, 2, 5])
        >>> documents
        Documents(<3 queries, 5 keys>)
        ■ ■ · · ·
        · · ■ ■ ■
        · · ■ ■ ■
        >>> (ch.Causal() & documents).dense(3, 5, align="lower_right").int()
        tensor([[1, 1, 0, 0, 0],
                [0, 0, 1, 1, 0],
                [0, 0, 1, 1, 1]], dtype=torch.int32)

        Document d is the queries from cu_q[d] up to cu_q[d + 1], and the keys from cu_k[d] up to cu_k[d + 1]; cu_k None
        means the same as cu_q. What stands beside it counts inside each document: other masks of the expression,
        `bias=`, `align=` and functions of positions, whose batch index is the document. They are those of a padded
        batch with a sequence for each document: `Lengths` holds a length for each document, and a `DenseMask` is
        (n, 1, Lq, Lk), as long as the longest. `align="lower_right"` is flash-attn's alignment. Beside a `Documents` of
        ids everything counts in the whole row. Make it outside of compiled code. Raises a `ShapeError` for sums of
        other documents.
        """
        queries = _cu_seqlens(cu_q, "cu_q")
        keys = queries if cu_k is None else _cu_seqlens(cu_k, "cu_k")
        if len(queries) != len(keys):
            raise ShapeError(
                f"Documents: cu_q has {len(queries)} entries and cu_k {len(keys)}; expected as many: one document's "
                "queries for each document's keys."
            )
        return DocumentsByEdges(DocumentEdges(queries, keys))

    @classmethod
    def from_position_ids(cls, position_ids: Integers) -> Documents:
        """Documents by the position of each token in its own, as collators give packed rows: (Lk,) or (B, Lk).

        >>> import clearhead as ch
        >>> ch.Documents.from_position_ids([0, 1, 0, 1, 2])
        Documents(<5>)
        ■ ■ · · ·
        ■ ■ · · ·
        · · ■ ■ ■
        · · ■ ■ ■
        · · ■ ■ ■

        A document begins where the positions do not go up: from any number on, and with gaps. Padding of one number at
        every place is a document a token. `run_on_clearhead` needs no such mask: the model makes one of its own.
        """
        expected = "(Lk,) or (B, Lk), the position of each token in its document."
        places = check_integers(position_ids, "Documents: position_ids", (1, 2), expected)
        begins = torch.zeros_like(places)
        # compared and not subtracted: a difference may not fit the dtype
        begins[..., 1:] = places[..., 1:] <= places[..., :-1]
        return cls(begins.cumsum(-1))

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        places = torch.arange(sizes.keys, device=sizes.device)
        ids = (places[None] + torch.arange(sizes.batch, device=sizes.device)[:, None]) // 3 % 4  # some recur
        return cls(ids)

    def title(self) -> str:
        return f"Documents(<{'×'.join(map(str, self.ids.shape))}>)"

    def signature(self) -> Hashable | None:
        return signature_of(self)

    def _read(self) -> Extents:
        return derived(self, self.ids, _extents)

    def drawn(self) -> Sizes:
        length = self.ids.shape[-1]
        return Sizes(self.ids.shape[0] if self.ids.ndim == 2 else 1, 1, length, length)

    def steps(self, sizes: Sizes, at: Sides, name: str = "mask") -> list[Step]:
        own = self._own(sizes)
        if not bool(((own >= 0) & (own < sizes.keys)).all()):  # queries without a document of their own
            return super().steps(sizes, at, name)
        ids = _rows(placed(self.ids, sizes.device, "Documents: ids"))
        batch = max(own.shape[0], ids.shape[0])
        return self._compare(ids.expand(batch, -1).gather(1, own[:, 0].expand(batch, -1)), ids, at, name)

    def _compare(self, mine: Tensor, ids: Tensor, at: Sides, name: str) -> list[Step]:
        """The steps that compare the documents of the queries, (B or 1, Lq), with those of the keys, (B or 1, Lk)."""
        rows, columns = part(mine.unsqueeze(1), *at[:3]).unsqueeze(-1), part(ids, at[0])[:, None, None, at[3]]
        row = "The number of the document that each key belongs to: a row."
        column = "The number of the document that each query belongs to: a column, (…, 1)."
        of_queries = Step(f"{name}_query_ids", column, rows, (*PAIRS[:3], "1"))
        of_keys = Step(f"{name}_key_ids", row, columns, (*PAIRS[:2], "1", "Lk"))
        why = "A query may see the keys of its own document. The column and the row broadcast to a matrix."
        return [of_queries, of_keys, made(name, why, of_queries.eq(of_keys), PAIRS)]

    def lower(self, sizes: Sizes) -> Spans:
        if self.ids.shape[-1] != sizes.keys or (self.ids.ndim == 2 and not one_or(self.ids.shape[0], sizes.batch)):
            expected = f"(Lk,) = ({sizes.keys},) or (B, Lk) = ({sizes.batch}, {sizes.keys})"
            hint = heads_second(sizes, self.ids.shape[-1])
            raise wrong_shape("Documents: ids", tuple(self.ids.shape), expected, sizes, hint)
        own = self._own(sizes)
        inside = (own >= 0) & (own < sizes.keys)
        extents = self._read()
        every = (self.ids, extents.first, extents.last)
        ids, first, last = (_rows(placed(t, sizes.device, "Documents: ids")) for t in every)
        read = self.ids
        if extents.values is not None:  # a copy: all masks of these values share the remembered normal form
            read = ids = ids.clone()
        if not sizes.keys:
            return Spans(torch.zeros_like(own), torch.zeros_like(own))
        batch = own.shape[0] if ids.shape[0] == 1 else ids.shape[0]
        at = own[:, 0].clamp(0, sizes.keys - 1).expand(batch, -1)
        mine, start, stop = (t.expand(batch, -1).gather(1, at).unsqueeze(1) for t in (ids, first, last + 1))
        start, stop = torch.where(inside, start, 0), torch.where(inside, stop, 0)
        if extents.together:
            return Spans(start, stop)

        def residual(batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
            rows = part(mine, batch, slice(None), queries).unsqueeze(-1)
            return rows == part(ids, batch)[:, None, None, keys]

        rows_of = mine[:, 0]

        def same(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return entry(rows_of, batch, query) == entry(ids, batch, key)

        return Spans(start, stop, ByPair(residual, same), (read,))

    def _own(self, sizes: Sizes) -> Tensor:
        """Each query's position among the keys, (B or 1, 1, Lq)."""
        return torch.arange(sizes.queries, device=sizes.device).view(1, 1, -1) + query_offset(sizes, "Documents")


class DocumentsByEdges(Documents):
    """Documents in which the masks and biases beside them count positions."""

    positional = False
    _document_edges: DocumentEdges

    def __init__(self, edges: DocumentEdges) -> None:
        self._document_edges = edges

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls(DocumentEdges.example(sizes))

    def title(self) -> str:
        return f"Documents(<{self._document_edges.queries.total} queries, {self._document_edges.keys.total} keys>)"

    def signature(self) -> Hashable | None:
        return (type(self), self._document_edges.numbers)

    def drawn(self) -> Sizes:
        return Sizes(1, 1, self._document_edges.queries.total, self._document_edges.keys.total)

    def steps(self, sizes: Sizes, at: Sides, name: str = "mask") -> list[Step]:
        edges = self._document_edges
        mine, ids = (row.locate(sizes.device)[0][None] for row in (edges.queries, edges.keys))
        return self._compare(mine, ids, at, name)

    def lower(self, sizes: Sizes) -> Spans:
        self._document_edges.validate_sizes(sizes)
        document, _ = self._document_edges.queries.locate(sizes.device)
        sums = moved(self._document_edges.keys.sums, sizes.device)
        return Spans(sums[document].view(1, 1, -1), sums[document + 1].view(1, 1, -1))


def _with_values(given: Any, name: str) -> Tensor:
    lengths = check_lengths(given, f"Documents: {name}")
    if has_no_values(lengths) or lengths.ndim != 1:
        raise ShapeError(
            f"Documents: {name} is {shown(lengths)}; expected one dimension, with values. For a batch of different "
            "packings pass ids, (B, Lk)."
        )
    return lengths


def _cu_seqlens(given: Any, name: str) -> Tensor:
    sums = _with_values(given, name)
    if not len(sums) or int(sums[0]) or bool((sums.diff() < 0).any()):
        raise ClearheadError(
            f"Documents: {name} is {sums.tolist() if sums.numel() <= 8 else tuple(sums.shape)}; expected the sums of "
            "the documents' lengths, (n + 1,): 0 first, none below the one before. For the lengths themselves use "
            "Documents.from_lengths(lengths)."
        )
    return sums


def _rows(ids: Tensor) -> Tensor:
    return ids if ids.ndim == 2 else ids[None]


class Extents(NamedTuple):
    """For each key the first and the last key of its document, (B, L), and whether all documents stand together."""

    first: Tensor
    last: Tensor
    together: bool
    values: Hashable | None  # the ids, where they are few


def _extents(given: Tensor) -> Extents:
    ids = _rows(given)
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
    known = is_readable(together) and bool(together)
    return Extents(first.gather(1, back), last.gather(1, back), known, few_values(given))
