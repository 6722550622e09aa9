"""Values of expressions whose parts may be used more than once."""

from __future__ import annotations

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
    order: list[Any] = []
    uses: dict[int, int] = {}
    waiting = [root]
    while waiting:
        part = waiting[-1]
        new = [one for one in inner(part) if id(one) not in uses]
        if new and id(part) not in uses:
            waiting.extend(reversed(new))
            continue
        waiting.pop()
        if id(part) not in uses:
            uses[id(part)] = 0
            order.append(part)
            for one in inner(part):
                uses[id(one)] += 1
    found: dict[int, Any] = {}
    for part in order:
        values = []
        for one in inner(part):
            uses[id(one)] -= 1
            values.append(found[id(one)] if uses[id(one)] else found.pop(id(one)))
        found[id(part)] = make(part, *values)
    value: T = found[id(root)]
    return value
