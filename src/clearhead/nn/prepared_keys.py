"""Keys and values that are projected once."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from clearhead.base.arrays import Array, shape_shown, shown
from clearhead.base.errors import ClearheadError
from clearhead.base.torch_state.mode import get_mode
from clearhead.nn._heads import have_one_dtype


class PreparedKeys:
    """Keys and values that a module has projected, for many calls. `module.prepare(key, value)` makes it.

    >>> import torch
    >>> from clearhead.nn import AdditiveAttention
    >>> attend, memory = AdditiveAttention(hidden_dim=8), torch.rand(2, 100, 16)
    >>> prepared = attend.prepare(memory, memory)
    >>> steps = [attend(torch.rand(2, 1, 20), prepared, valid_lens=[80, 100]) for _ in range(10)]
    >>> prepared
    PreparedKeys(key (2, 100, 8), value (2, 100, 16))

    Pass it in the place of the key, and no value. Outputs, weights and gradients are the same as with the key and the
    value themselves; the projection is in the graph once, so a loss on all the calls has one backward pass. The
    projection is computed from the module's parameters at the time: after an optimizer's step, or another state dict,
    prepare again. `len(prepared)`: how many keys there are; where they are nested, how many the longest sequence has.
    Raises a `ClearheadError` in a module that did not make it, a copy of its module included.
    """

    def __init__(self, key: Array, value: Array, by: nn.Module) -> None:
        self._key, self._value = key, value
        # no reference: a copy or a pickle of the keys would take the module with it
        self._by = None if get_mode().compiled else id(by)

    def over(self, key: Array, value: Array) -> PreparedKeys:
        """Prepared keys of the same module over these."""
        other = copy.copy(self)
        other._key, other._value = key, value
        return other

    def __len__(self) -> int:
        if isinstance(self._key, Tensor) and self._key.is_nested:
            return max((int(part.shape[-2]) for part in self._key.unbind()), default=0)
        return int(self._key.shape[-2])

    def __repr__(self) -> str:
        return f"PreparedKeys(key {shape_shown(self._key)}, value {shape_shown(self._value)})"


def unpack_prepared_keys(prepared: PreparedKeys, query: Any, value: Any, module: nn.Module) -> tuple[Any, Any]:
    """Return the projected key and value, for a call of this module."""
    if value is not None:
        raise ClearheadError(
            f"a value, {shown(value)}, is given beside {prepared!r}, which has its own.\n"
            "Pass one of the two: attend(query, prepared), or attend(query, key, value). A mask goes to mask=."
        )
    if not get_mode().compiled and prepared._by not in (None, id(module)):
        raise ClearheadError(
            f"{prepared!r} was made by another module than this {type(module).__name__}, with other weights.\n"
            "Each module prepares its own: prepared = attend.prepare(key, value), then attend(query, prepared)."
        )
    key = prepared._key
    if isinstance(query, Tensor) and isinstance(key, Tensor) and not have_one_dtype(query, key):
        raise ClearheadError(
            f"query, shape {shape_shown(query)}, is {query.dtype}, and {prepared!r} is {key.dtype}.\nPrepare the keys "
            "as the queries are computed: both under torch.autocast or neither, and after the module was converted."
        )
    return key, prepared._value
