"""Nested tensors as packed rows, with documents as the mask of these rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.base.document_edges import DocumentEdges, RowEdges
from clearhead.base.errors import ClearheadError, ShapeError, UnsupportedError, columns
from clearhead.base.torch_state.active import interpreter
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.tensor_kind import unwrap
from clearhead.masks.base import Mask
from clearhead.masks.dense import DenseMask
from clearhead.masks.documents import DocumentsByEdges


def is_nested(array: Any) -> bool:
    """Return whether the argument is a nested tensor, maybe wrapped by `torch.func`."""
    if not isinstance(array, Tensor):
        return False
    return bool(array.is_nested if interpreter() is None or get_mode().compiled else unwrap(array).is_nested)


class PackedRows(NamedTuple):
    """The nested tensors of a call as packed rows, (1, H, T, D) or (1, T, D), and the edges of their sequences."""

    given: dict[str, Tensor]
    rows: dict[str, Tensor]
    sums: dict[str, Tensor]  # the cumulative sums of the sequences' lengths, on their device
    edges: DocumentEdges

    def make_mask(self, mask: Any) -> Mask:
        """Return the mask of the padded batch, for the packed rows."""
        documents = DocumentsByEdges(self.edges)
        if mask is None:
            return documents
        return documents & (mask if isinstance(mask, Mask) else _as_mask(mask))

    def get_side(self, name: str) -> RowEdges:
        """Return the edges of "query" or "key"."""
        return self.edges.queries if name == "query" else self.edges.keys

    def make_padded_shape(self, name: str) -> Tensor:
        """Return a tensor of the shape that "query" or "key" has in the padded batch, without values."""
        side, row = self.get_side(name), self.rows[name]
        return row.new_empty((len(side.lengths), side.longest, row.shape[-1]), device="meta")

    def look_up(self, name: str, table: Tensor | None) -> Tensor:
        """Return the numbers of the vectors of "query" or "key", (T,), from a table of the padded batch.

        Args:
            name: "query" or "key".
            table: (L,) or (n, L); None: the index of each vector in its sequence.
        """
        document, index = self.get_side(name).locate(self.rows[name].device if table is None else table.device)
        if table is None:
            return index
        return table[index] if table.ndim == 1 else table[document, index]

    def nest(self, name: str, output: Any) -> Any:
        """Return an output (1, T, D) or (1, H, T, D) nested like "query" or "key"."""
        output, given = output[0], self.given[name]
        if given.layout is torch.strided:
            return torch.nested.as_nested_tensor(list(torch.split(output, self.get_side(name).lengths.tolist(), -2)))
        found = torch.nested.nested_tensor_from_jagged(output.movedim(-2, 0), self.sums[name])
        return found.transpose(1, 2) if found.dim() == 4 else found


def pack(named: dict[str, Any], hint: str) -> PackedRows:
    """Return the packed rows of nested query and key, and of a value if there is one.

    Args:
        named: The tensors by name. Without a query the key takes its place.
        hint: The last words of the error for too many dimensions.

    Raises:
        UnsupportedError: In compiled code and in transforms of `torch.func`.
        ClearheadError: If some of the tensors are not nested.
        ShapeError: If the lengths of the sequences differ.
    """
    mode = get_mode()
    if mode.compiled or mode.transforms:
        raise UnsupportedError(
            "clearhead reads nested tensors on the host, so compiled code and torch.func cannot use them.\n"
            "There pass padded tensors and mask=Lengths(valid_lens)."
        )
    if not all(map(is_nested, named.values())):
        kinds = {name: "nested" if is_nested(given) else "not" for name, given in named.items()}
        raise ClearheadError(
            f"{', '.join(f'{name} is {kind}' for name, kind in kinds.items())}; expected nested tensors for all.\n"
            "Or pass to_padded_tensor(0.0) of the nested ones and mask=Lengths(valid_lens)."
        )
    read: dict[int, tuple[Tensor, Tensor]] = {}  # by identity: read a tensor once that is both key and value
    for name, given in named.items():
        if id(given) not in read:
            read[id(given)] = _read_rows(name, given, hint)
    found = {name: read[id(given)] for name, given in named.items()}
    rows, sums = ({name: part[i] for name, part in found.items()} for i in (0, 1))
    key = sums["key"]
    query = sums.get("query", key)
    if len(query) != len(key):
        raise ShapeError(f"query has {len(query) - 1} sequences and key has {len(key) - 1}; expected equal numbers.")
    if "value" in sums and not torch.equal(sums["value"], key):
        lengths = {name: tuple(sums[name].diff().tolist()[:8]) for name in ("key", "value")}
        raise ShapeError("key and value have sequences of different lengths.\n" + columns(lengths))
    return PackedRows(named, rows, sums, DocumentEdges(query, key, nested=True))


def _read_rows(name: str, given: Any, hint: str) -> tuple[Tensor, Tensor]:
    """Return the sequences of a nested tensor one after the other, and their edges, (n + 1,)."""
    if given.layout is torch.strided:
        parts = given.unbind()
        if {part.ndim for part in parts} not in ({2}, {3}):
            raise ShapeError(f"{name} is nested; expected one or more sequences, all (L, D) or all (H, L, D).")
        lengths = torch.tensor([0, *(part.shape[-2] for part in parts)], device=given.device)
        return torch.cat(parts, -2)[None], lengths.cumsum(0)
    ragged = [dim for dim, size in enumerate(given.shape) if not isinstance(size, int)]
    if given.dim() not in (3, 4) or ragged != [given.dim() - 2]:
        raise ShapeError(
            f"{name} is a nested tensor of shape {tuple(given.shape)}; expected (B, j, D) or (B, H, j, D), where j is "
            f"the ragged dimension. {hint}"
        )
    flat = given.transpose(1, 2) if given.dim() == 4 else given
    values, edges, lengths = flat.values(), flat.offsets(), flat.lengths()
    if lengths is not None:  # the memory has gaps between sequences; contiguous() gives a gradient of a wrong shape
        starts, edges = edges[:-1], torch.cat((edges[:1] * 0, lengths.cumsum(0)))
        moves = (starts - edges[:-1]).repeat_interleave(lengths)
        values = values[moves + torch.arange(len(moves), device=values.device)]
    return values[None] if values.ndim == 2 else values.transpose(0, 1)[None], edges


def _as_mask(mask: Any) -> Mask:
    if isinstance(mask, Tensor | np.ndarray) and str(mask.dtype).rpartition(".")[2] in ("bool", "bool_"):
        return DenseMask(mask)
    raise ClearheadError(
        f"mask is a {type(mask).__name__}; expected a Mask, such as Causal(), or a bool tensor for the padded "
        "sequences, (B, Lq, Lk) or (B, H, Lq, Lk), beside nested tensors.\nPass numbers to add to the scores as bias=."
    )
