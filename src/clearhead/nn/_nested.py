"""Nested inputs of modules: the sequences are projected and attended to as packed rows, without padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from clearhead.base.errors import ShapeError, UnsupportedError
from clearhead.base.shapes import Sizes
from clearhead.nn._positions import places_of
from clearhead.nn.prepared_keys import PreparedKeys
from clearhead.problem.nested import Packed, is_nested, pack

WIDE = "The module makes the heads by itself, of (B, j, E)."
HEADS = "Heads stand before the length."


class Nested(NamedTuple):
    """The nested inputs of a call as packed rows (1, T, E); prepared keys as packed prepared keys."""

    packed: Packed
    query: Any
    key: Any
    value: Any

    def batch(self, name: str) -> Tensor:
        """Return a tensor of the shape that "query" or "key" has in the padded batch, without values."""
        return _padded_shape(self.packed, name)

    def sizes(self, row: Sizes) -> Sizes:
        """Return the sizes of the padded batch."""
        return self.packed.edges.padded(row)

    def back(self, output: Any) -> Any:
        """Return the output of the packed queries, nested like these."""
        return self.packed.nest("query", output)


def nested_inputs(query: Any, key: Any, value: Any, cache: Any = None, hint: str = WIDE) -> Nested | None:
    """Return the inputs of a call as packed rows; None where no input is nested.

    Raises:
        ClearheadError: If some inputs are nested and others are not.
        ShapeError: If the sequences do not fit each other, or the module.
        UnsupportedError: If there is a cache.
    """
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
    packed = pack(named, hint)
    for name, given in named.items():
        if hint == WIDE and given.dim() != 3 and (name == "query" or not prepared):
            raise ShapeError(f"{name} is nested with {given.dim()} dimensions; expected (B, j, E). {WIDE}")
    rows = packed.rows
    if prepared:
        return Nested(packed, rows["query"], key.over(rows["key"], rows["value"]), value)
    return Nested(packed, rows["query"], rows["key"], rows.get("value"))


def by_rows(encode: Callable[..., Tensor], x: Tensor, offset: Any, positions: Any, who: str) -> Tensor:
    """Return what `encode(x, positions=...)` makes of a nested tensor (B, j, E) or (B, H, j, E), given as one row.

    Args:
        encode: The encoding.
        x: The nested tensor.
        offset, positions: Those of the padded batch.
        who: The name of the module, for errors.
    """
    name = f"{who}: x"
    packed = pack({name: x, "key": x}, HEADS)
    places = places_of(_padded_shape(packed, "key"), offset, positions, who)
    at = packed.look_up("key", places if isinstance(places, Tensor) else None)
    return packed.nest("key", encode(packed.rows["key"], positions=at if isinstance(places, Tensor) else at + places))


def _padded_shape(packed: Packed, name: str) -> Tensor:
    side = packed.edges.queries if name == "query" else packed.edges.keys
    row = packed.rows[name]
    return row.new_empty((len(side.lengths), side.longest, row.shape[-1]), device="meta")
