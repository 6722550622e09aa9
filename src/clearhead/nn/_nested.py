"""Nested inputs of modules: the sequences are projected and attended to as packed rows, without padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from clearhead.base.errors import UnsupportedError
from clearhead.nn._positions import places_of
from clearhead.nn.prepared_keys import PreparedKeys
from clearhead.problem.nested import PackedRows, is_nested, pack

HEADS = "Heads stand before the length."


def pack_inputs(query: Any, key: Any, value: Any, cache: Any = None) -> tuple[PackedRows | None, Any, Any, Any]:
    """Return the nested inputs of a call as packed rows (1, T, E), after what packs them; None and others as they are.

    Raises:
        ClearheadError: If some inputs are nested and others are not.
        ShapeError: If the sequences do not fit each other.
        UnsupportedError: If there is a cache.
    """
    prepared = isinstance(key, PreparedKeys)
    named = {"query": query, "key": key._key if prepared else key}
    if prepared or value is not None:
        named["value"] = key._value if prepared else value
    if not any(map(is_nested, named.values())):
        return None, query, key, value
    if cache is not None:
        raise UnsupportedError(
            "a cache is given beside nested tensors, and it holds padded batches: pass padded tensors, and new_lens=, "
            "which says how many new keys of each sequence the cache keeps."
        )
    packed = pack(named, HEADS)
    rows = packed.rows
    if prepared:
        return packed, rows["query"], key.over(rows["key"], rows["value"]), value
    return packed, rows["query"], rows["key"], rows.get("value")


def encode_rows(encode: Callable[..., Tensor], x: Tensor, offset: Any, positions: Any, who: str) -> Tensor:
    """Return what `encode(x, positions=...)` makes of a nested tensor (B, j, E) or (B, H, j, E), given as one row.

    Args:
        encode: The encoding.
        x: The nested tensor.
        offset, positions: Those of the padded batch.
        who: The name of the module, for errors.
    """
    name = f"{who}: x"
    packed = pack({name: x, "key": x}, HEADS)
    places = places_of(packed.make_padded_shape("key"), offset, positions, who)
    at = packed.look_up("key", places) if isinstance(places, Tensor) else packed.look_up("key", None) + places
    found: Tensor = packed.nest("key", encode(packed.rows["key"], positions=at))
    return found
