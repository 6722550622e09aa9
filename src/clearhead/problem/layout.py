"""The layouts of a call's arguments: the axis of the heads, and nested tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.problem.nested import is_nested, pack

LAYOUTS = ("BHLD", "BLHD", "LHD")
ARRANGED = ("query", "key", "value", "mask", "bias", "align")


class Arranged(NamedTuple):
    """The arguments of a call as (B, H, L, D); `back` converts the output to the caller's layout."""

    query: Any
    key: Any
    value: Any
    mask: Any
    bias: Any
    align: Any
    back: Callable[[Any], Any]


def is_arranged(query: Any, key: Any, layout: Any) -> bool:
    """Return whether query and key are (..., H, L, D) tensors or arrays already."""
    return type(layout) is str and layout == "BHLD" and not is_nested(query) and not is_nested(key)


def arrange(query: Any, key: Any, value: Any, mask: Any, bias: Any, align: Any, layout: Any) -> Arranged:
    """Convert the arguments of a call in any layout to the layout of engines; `value` is None for the weights alone."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ClearheadError(
            f"layout is {layout!r:.60}; expected 'BHLD' (heads before the length), 'BLHD' (heads after it) or 'LHD' "
            "(packed rows without a batch axis)."
        )
    named = {"query": query, "key": key} | ({} if value is None else {"value": value})
    if layout != "BHLD":
        named = {name: _heads_first(name, given, layout) for name, given in named.items()}

    def back(output: Any) -> Any:
        if layout == "BHLD":
            return output
        return _turned(output[0] if layout == "LHD" else output)

    if not any(map(is_nested, named.values())):
        return Arranged(named["query"], named["key"], named.get("value"), mask, bias, align, back)
    packed = pack(named, "For (B, j, H, D) pass layout='BLHD'.")
    query, key, value = (packed.rows.get(name) for name in ("query", "key", "value"))
    mask = packed.make_mask(mask)
    return Arranged(query, key, value, mask, bias, align, lambda output: back(packed.nest("query", output)))


def _turned(array: Any) -> Any:
    return array.transpose(-3, -2) if isinstance(array, Tensor) else array.swapaxes(-3, -2)


def _heads_first(name: str, array: Any, layout: str) -> Any:
    dims = getattr(array, "ndim", None)
    if dims is None or not (dims == 3 if layout == "LHD" else dims >= 4):
        expected = "three dimensions, (L, H, D)" if layout == "LHD" else "four dimensions, (B, L, H, D), or more"
        got = f"shape {tuple(array.shape)}" if dims is not None else f"type {type(array).__name__}"
        raise ShapeError(f"{name} has {got}; expected {expected}, for layout={layout!r}.")
    return _turned(array)[None] if layout == "LHD" else _turned(array)
