"""Values that are kept between calls, within one limit in bytes for all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from clearhead.base.torch_state.mode import is_capturing_graph

Value = TypeVar("Value")
LIMIT = 2**28  # bytes of all tables together


class Memo(dict[Any, Any]):
    """Values that engines have derived from a rule or a mask, by their names. Copies and pickles have none.

    `bytes`: the memory of all values that were set.
    """

    bytes = 0

    def __setitem__(self, name: Any, value: Any) -> None:
        self.bytes += size_of(value)
        super().__setitem__(name, value)

    def derive(self, name: Any, make: Callable[[], Value]) -> Value:
        """The value of this name, which `make` computes without a graph at the first use. None is kept while a CUDA
        graph is captured, since its memory is the graph's."""
        if name in self:
            return cast(Value, self[name])
        with torch.inference_mode(False), torch.no_grad():
            made = make()
        if not is_capturing_graph():
            self[name] = made
        return made

    def __reduce__(self) -> Any:
        return Memo, ()

    def __deepcopy__(self, _: Any) -> Memo:
        return Memo()


class Table(dict[Any, Any]):
    """Values that are kept between calls, at most `most`.

    All tables together keep LIMIT bytes, or else one value. The values that were used longest ago are dropped first.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def use(self, key: Any) -> Any:
        """The value of a key, or None."""
        entry = _order.pop((id(self), key), None)
        if entry is not None:
            _order[id(self), key] = entry  # the last one was used last
        return self.get(key)

    def keep(self, key: Any, value: Any, size: int, memo: Memo | None = None) -> None:
        """Keep a value of `size` bytes; `memo` holds more of its memory, and may grow."""
        own, place = id(self), (id(self), key)
        if key not in self and len(self) >= self.most:
            _drop(next((old for old in [*_order] if old[0] == own), place))
        self[key] = value
        _order.pop(place, None)
        _order[place] = Entry(weakref.ref(self), size, None if memo is None else weakref.ref(memo))
        total = 0
        for old, entry in reversed([*_order.items()]):
            total += entry.bytes
            if (total > LIMIT and old != place) or entry.table() is None:
                _drop(old)


class Entry(NamedTuple):
    """A value of a table: where it is, and how much memory it takes. It keeps neither the table nor the memo alive."""

    table: weakref.ref[Table]
    size: int
    memo: weakref.ref[Memo] | None

    @property
    def bytes(self) -> int:
        memo = None if self.memo is None else self.memo()
        return self.size + (0 if memo is None else memo.bytes)


_order: dict[tuple[int, Any], Entry] = {}  # by table and key, from the value that was used longest ago


def _drop(place: tuple[int, Any]) -> None:
    entry = _order.pop(place, None)
    table = None if entry is None else entry.table()
    if table is not None:
        table.pop(place[1], None)


def size_of(value: Any) -> int:
    """The bytes of a value that is kept: of its tensors and arrays, and of objects that have `bytes`."""
    if isinstance(value, Tensor):
        return value.untyped_storage().nbytes()
    if isinstance(value, np.ndarray):
        return value.nbytes if value.base is None else 0  # else it shares a tensor's memory
    if isinstance(value, tuple | list):
        return sum(map(size_of, value))
    size = getattr(value, "bytes", 0)
    return size if isinstance(size, int) else 0
