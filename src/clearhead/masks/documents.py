"""Masks of documents that are packed one after the other."""

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
    """Each query attends to the keys of its own document: sequences packed one after the other.

    >>> import torch, clearhead as ch
    >>> ch.Causal() & ch.Documents.from_lengths([2, 3])
    Causal() & Documents(<5>)
    ■ · · · ·
    ■ ■ · · ·
    · · ■ · ·
    · · ■ ■ ·
    · · ■ ■ ■

    `Documents.from_lengths` takes the lengths of the documents, `Documents.from_position_ids` the position of each
    token in its document, and `Documents.from_cu_seqlens` the document edges, which may differ for queries and keys.

    Documents whose keys are contiguous become intervals. An id that occurs again after other documents works too, at
    the cost of one comparison for each pair.

    The mask copies `ids`: later writes to them do not change it. (A `DenseMask`, and a `MaskFunction` that reads a
    tensor, change with the tensor.)

    Args:
        ids: The document of each key: integers (Lk,) or (B, Lk), as a list, array or tensor.

    Raises:
        ClearheadError: If `ids` has another dtype or shape.

    Formula:
        Query i attends to the keys j with ids[j] = ids[i + p], where p is the position of query 0. If no key has the
        position i + p, query i attends to no key.

    Cost:
        O(Lk log Lk).
    """

    positional = True

    def __init__(self, ids: Integers) -> None:
        expected = "(Lk,) or (B, Lk), one for each key. For the documents' lengths use Documents.from_lengths(lengths)."
        self.ids = own(check_integers(ids, "Documents: ids", (1, 2), expected))
        self._read()  # caches the result in eager code, for compiled code to read

    @classmethod
    def from_lengths(cls, lengths: Integers) -> Documents:
        """Make documents of these lengths, one after the other.

        The size of the mask depends on the values of `lengths`, so call this outside of compiled code.

        Args:
            lengths: The length of each document: integers (n,), as a list, array or tensor.

        Returns:
            The mask, for sum(lengths) keys.

        Raises:
            ClearheadError: If `lengths` has another dtype or shape, or a negative length.
        """
        lengths = _with_values(lengths, "lengths")
        return cls(torch.arange(lengths.shape[0], device=lengths.device).repeat_interleave(lengths))

    @classmethod
    def from_cu_seqlens(cls, cu_q: Integers, cu_k: Integers | None = None) -> Documents:
        """Make documents from cumulative sums of their lengths, as variable-length kernels take them.

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

        Document d has the queries from cu_q[d] up to cu_q[d + 1], and the keys from cu_k[d] up to cu_k[d + 1].

        Beside this mask, positions count inside each document: in the other masks of the expression, in `bias=`, in
        `align=`, and in functions of positions, whose batch index is the document. Masks and biases have the sizes of a
        padded batch with one sequence for each document: `Lengths` holds one length for each document, and a
        `DenseMask` is (n, 1, Lq, Lk) with the longest Lq and Lk. `align="lower_right"` is flash-attn's alignment.
        Beside a `Documents` of ids, positions count in the whole row.

        Call this outside of compiled code.

        Args:
            cu_q: The cumulative sums of the numbers of queries: integers (n + 1,), from 0 on, ascending.
            cu_k: The same of the keys; None (default): the same as `cu_q`.

        Returns:
            The mask, for cu_q[-1] queries and cu_k[-1] keys.

        Raises:
            ShapeError: If `cu_q` and `cu_k` have different lengths, or one of them is not one-dimensional.
            ClearheadError: If an argument does not begin at 0, or decreases.
        """
        queries = _cu_seqlens(cu_q, "cu_q")
        keys = queries if cu_k is None else _cu_seqlens(cu_k, "cu_k")
        if len(queries) != len(keys):
            raise ShapeError(
                f"Documents: cu_q has {len(queries)} entries and cu_k {len(keys)}; expected equal numbers, since each "
                "document has queries and keys."
            )
        return DocumentsByEdges(DocumentEdges(queries, keys))

    @classmethod
    def from_position_ids(cls, position_ids: Integers) -> Documents:
        """Make documents from the position of each token in its document, as collators give packed rows.

        >>> import clearhead as ch
        >>> ch.Documents.from_position_ids([0, 1, 0, 1, 2])
        Documents(<5>)
        ■ ■ · · ·
        ■ ■ · · ·
        · · ■ ■ ■
        · · ■ ■ ■
        · · ■ ■ ■

        A document begins wherever the positions do not increase. Its first position may be any number, and gaps are
        allowed. Padding with one repeated number becomes one document for each token. A model that `run_on_clearhead`
        runs makes such a mask itself.

        Args:
            position_ids: The position of each token in its document: integers (Lk,) or (B, Lk).

        Returns:
            The mask, for Lk keys.

        Raises:
            ClearheadError: If `position_ids` has another dtype or shape.
        """
        expected = "(Lk,) or (B, Lk), the position of each token in its document."
        places = check_integers(position_ids, "Documents: position_ids", (1, 2), expected)
        begins = torch.zeros_like(places)
        # compare rather than subtract: a difference may overflow the dtype
        begins[..., 1:] = places[..., 1:] <= places[..., :-1]
        return cls(begins.cumsum(-1))

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        places = torch.arange(sizes.keys, device=sizes.device)
        ids = (places[None] + torch.arange(sizes.batch, device=sizes.device)[:, None]) // 3 % 4  # some ids occur again
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
        if not bool(((own >= 0) & (own < sizes.keys)).all()):  # some queries belong to no document
            return super().steps(sizes, at, name)
        ids = _rows(placed(self.ids, sizes.device, "Documents: ids"))
        batch = max(own.shape[0], ids.shape[0])
        return self._compare(ids.expand(batch, -1).gather(1, own[:, 0].expand(batch, -1)), ids, at, name)

    def _compare(self, mine: Tensor, ids: Tensor, at: Sides, name: str) -> list[Step]:
        """Return the steps that compare the documents of the queries, (B or 1, Lq), and of the keys, (B or 1, Lk)."""
        rows, columns = part(mine.unsqueeze(1), *at[:3]).unsqueeze(-1), part(ids, at[0])[:, None, None, at[3]]
        row = "The number of the document that each key belongs to: a row."
        column = "The number of the document that each query belongs to: a column, (…, 1)."
        of_queries = Step(f"{name}_query_ids", column, rows, (*PAIRS[:3], "1"))
        of_keys = Step(f"{name}_key_ids", row, columns, (*PAIRS[:2], "1", "Lk"))
        why = "A query may attend to the keys of its own document. The column and the row broadcast to a matrix."
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
        if extents.values is not None:  # copy: all masks with these values share the cached normal form
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
        """Return the position of each query among the keys, (B or 1, 1, Lq)."""
        return torch.arange(sizes.queries, device=sizes.device).view(1, 1, -1) + query_offset(sizes, "Documents")


class DocumentsByEdges(Documents):
    """Documents inside of which the masks and biases beside them count positions."""

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
            f"Documents: {name} is {shown(lengths)}; expected one dimension, with values.\nFor a batch of packed rows "
            "pass ids, (B, Lk)."
        )
    return lengths


def _cu_seqlens(given: Any, name: str) -> Tensor:
    sums = _with_values(given, name)
    if not len(sums) or int(sums[0]) or bool((sums.diff() < 0).any()):
        raise ClearheadError(
            f"Documents: {name} is {sums.tolist() if sums.numel() <= 8 else tuple(sums.shape)}; expected cumulative "
            "sums of lengths, (n + 1,), from 0 on, never decreasing.\nIf these are the lengths, use "
            "Documents.from_lengths(lengths)."
        )
    return sums


def _rows(ids: Tensor) -> Tensor:
    return ids if ids.ndim == 2 else ids[None]


class Extents(NamedTuple):
    """The first and the last key of each key's document, (B, L), and whether all documents are contiguous."""

    first: Tensor
    last: Tensor
    together: bool
    values: Hashable | None  # the ids, if there are few


def _extents(given: Tensor) -> Extents:
    ids = _rows(given)
    length = ids.shape[1]
    order = ids.argsort(dim=1, stable=True)  # stable: each document keeps the order of its keys
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
