"""Values of expressions whose parts may be used more than once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def fold(root: Any, inner: Callable[[Any], Sequence[Any]], make: Callable[..., T]) -> T:
    """Compute a value of an expression from those of its parts, without recursion.

    Args:
        root: The expression.
        inner: The parts that a part joins; none for a leaf.
        make: `make(part, *values)` gives the value of a part from those of the parts that it joins. It is called once
            for each part, in the order of the expression, however often the part is used.

    Returns:
        The value of the root. A value of a part is held until its last use.
    """
    order: dict[int, Any] = {}
    waiting = [(root, False)]
    while waiting:
        part, joins = waiting.pop()  # `joins`: whether the parts that it joins stand in the order
        if id(part) in order:
            continue
        if joins:
            order[id(part)] = part
        else:
            waiting += [(part, True), *[(one, False) for one in reversed(inner(part))]]
    uses = Counter([id(one) for part in order.values() for one in inner(part)])
    found: dict[int, Any] = {}
    for number, part in order.items():
        parts = [id(one) for one in inner(part)]
        values = [found[one] for one in parts]
        uses.subtract(parts)
        for one in parts:
            if not uses[one]:
                found.pop(one, None)
        found[number] = make(part, *values)
    value: T = found[id(root)]
    return value
