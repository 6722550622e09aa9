"""Which layers and heads are meant."""

from __future__ import annotations

import re
from collections.abc import Sequence

from clearhead.base.errors import ClearheadError
from clearhead.base.selected import numbers_of
from clearhead.models.attention_call import AttentionCall
from clearhead.models.calls import chosen_calls

RANGE = re.compile(r"(-?[0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)
COMMA = re.compile(r",(?! *(?:cross|run|step)\b)")  # between items: the name of a layer may have one


def calls_of(calls: Sequence[AttentionCall], layers: str | None) -> list[int]:
    """The numbers of the calls that a list of layers' numbers, ranges, names and patterns names, in its order."""
    if layers is None:
        return list(range(len(calls)))
    found: list[int] = []
    for item in map(str.strip, COMMA.split(layers)):
        numbers = _range("--layers", item)
        try:
            some = chosen_calls(calls, item if numbers is None else numbers, "--layers")
        except ClearheadError as error:
            raise ClearheadError(
                f"{error} Expected are numbers and ranges, such as 0,2,5-7, or names and patterns, such as "
                f"{calls[0].name!r}."
            ) from None
        found += some
    return list(dict.fromkeys(found))


def chosen_heads(heads: str | None, count: int, name: str) -> list[int] | None:
    """The numbers of the heads that a list of numbers and ranges names, sorted; None for all."""
    if heads is None:
        return None
    found: list[int] = []
    for item in map(str.strip, heads.split(",")):
        numbers = _range("--heads", item)
        if numbers is None:
            raise ClearheadError(f"--heads is {heads!r:.80}; expected numbers and ranges, such as 0-3,7.")
        found += numbers_of(numbers, count, "--heads", f"{name} has {count} heads")
    return sorted(set(found))


def _range(option: str, item: str) -> list[int] | None:
    """The numbers of `3`, of `-1` or of `5-7`; None for what is none of them."""
    match = RANGE.fullmatch(item)
    if match is None:
        return None
    low, high = int(match[1]), int(match[2] or match[1])
    if high < low:
        raise ClearheadError(f"{option}: the range {item!r} is empty; pass it as {high}-{low}.")
    return list(range(low, high + 1))
