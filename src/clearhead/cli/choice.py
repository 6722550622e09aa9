"""Which layers and heads are meant."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from clearhead.base.errors import ClearheadError

RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)


def chosen_calls(names: Sequence[str], layers: str | None) -> list[int]:
    """The numbers of the calls that a list of numbers, ranges, names and patterns names, in its order."""
    if layers is None:
        return list(range(len(names)))
    found: list[int] = []
    for item in map(str.strip, layers.split(",")):
        numbers = _range("--layers", item, len(names), f"the model made {len(names)} calls")
        if numbers is None:
            numbers = [i for i, name in enumerate(names) if name == item or fnmatchcase(name, item)]
        if not numbers:
            raise ClearheadError(
                f"--layers: no module is called {item!r:.80}; expected numbers and ranges, such as 0,2,5-7, or names "
                f"and patterns, such as {names[0]!r}."
            )
        found += numbers
    return list(dict.fromkeys(found))


def chosen_heads(heads: str | None, count: int, name: str) -> list[int] | None:
    """The numbers of the heads that a list of numbers and ranges names, sorted; None for all."""
    if heads is None:
        return None
    found: set[int] = set()
    for item in map(str.strip, heads.split(",")):
        numbers = _range("--heads", item, count, f"{name} has {count} heads")
        if numbers is None:
            raise ClearheadError(f"--heads is {heads!r:.80}; expected numbers and ranges, such as 0-3,7.")
        found.update(numbers)
    return sorted(found)


def _range(option: str, item: str, count: int, has: str) -> list[int] | None:
    """The numbers of `3` or of `5-7`; None for what is neither."""
    match = RANGE.fullmatch(item)
    if match is None:
        return None
    low, high = int(match[1]), int(match[2] or match[1])
    if high < low:
        raise ClearheadError(f"{option}: the range {item!r} is empty; pass it as {high}-{low}.")
    if high >= count:
        raise ClearheadError(f"{option} asks for {item}, and {has}: 0 to {count - 1}.")
    return list(range(low, high + 1))
