"""Nested inputs of modules: the sequences are projected and attended to as packed rows, without padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from clearhead.base.errors import ShapeError, UnsupportedError
from clearhead.base.positions import check_align
from clearhead.base.shapes import Sizes
from clearhead.nn._positions import places_of
from clearhead.nn.prepared_keys import PreparedKeys
from clearhead.problem.nested import Packed, is_nested, packed, row

WIDE = "The module makes the heads by itself, of (B, j, E)."
HEADS = "Heads stand before the length."


class Nested(NamedTuple):
    """The nested inputs of a call as packed rows (1, T, E); prepared keys as packed prepared keys."""

    packed: Packed
    query: Any
    key: Any
    value: Any

    def batch(self, name: str) -> Tensor:
        """A tensor of the shape that "query" or "key" has in the padded batch, without values."""
        rows = self.packed.rows[name]
        longest = self.packed.sequences.longest[0 if name == "query" else 1]
        return rows.packed.new_empty((len(rows.edges) - 1, longest, rows.packed.shape[-1]), device="meta")

    def sizes(self, row: Sizes) -> Sizes:
        """The sizes of the padded batch."""
        return self.packed.sequences.padded(row)

    def back(self, output: Any) -> Any:
        """The output of the packed queries, nested like these."""
        return self.packed.rows["query"].nested(output)


def nested_inputs(
    query: Any, key: Any, value: Any, align: Any = None, cache: Any = None, hint: str = WIDE
) -> Nested | None:
    """The inputs of a call as packed rows; None where none of them is nested. Raises where some of them are not."""
    prepared = isinstance(key, PreparedKeys)
    if not prepared and not any(map(is_nested, (query, key, value))):
        return None
    named = {"query": query, "key": key._key if prepared else key}
    if prepared or value is not None:
        named["value"] = key._value if prepared else value
    if not any(map(is_nested, named.values())):
        return None
    if cache is not None:
        raise UnsupportedError(
            "a cache is given beside nested tensors, and it holds padded batches: pass padded tensors, and new_lens=, "
            "which says how many new keys of each sequence the cache keeps."
        )
    found = packed(named, check_align(align), hint)
    rows = {name: one.packed for name, one in found.rows.items()}
    if hint == WIDE:
        refuse_heads({"query": query} if prepared else named)
    if prepared:
        return Nested(found, rows["query"], key.over(rows["key"], rows["value"]), value)
    return Nested(found, rows["query"], rows["key"], rows.get("value"))


def refuse_heads(named: dict[str, Tensor]) -> None:
    """Refuse nested vectors that are split into heads."""
    for name, given in named.items():
        if given.dim() != 3:
            raise ShapeError(f"{name} is nested with {given.dim()} dimensions; expected (B, j, E). {WIDE}")


def by_rows(encode: Callable[..., Tensor], x: Tensor, offset: Any, positions: Any, who: str) -> Tensor:
    """What `encode(x, positions=...)` makes of a nested tensor (B, j, E) or (B, H, j, E), which it is given as one row.
    `offset`, `positions`: those of the padded batch."""
    rows = row(f"{who}: x", x, HEADS)
    lengths = rows.edges.diff().tolist()
    batch = rows.packed.new_empty((len(lengths), max([0, *lengths]), rows.packed.shape[-1]), device="meta")
    places = places_of(batch, offset, positions, who)
    places = rows.placed(places) if isinstance(places, Tensor) else rows.placed() + places
    return rows.nested(encode(rows.packed, positions=places))
