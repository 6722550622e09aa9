"""Which layers, and which of their heads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from clearhead.base.errors import ClearheadError
from clearhead.models.calls import listed

Layers = int | str | Sequence[int | str] | None
Heads = int | slice | Sequence[int] | None


def fits(layer: int | str, name: str, number: int) -> bool:
    return number == layer if isinstance(layer, int) else name == layer or fnmatchcase(name, layer)


def checked_layers(layers: Any, who: str) -> tuple[int | str, ...] | None:
    if layers is None:
        return None
    found: tuple[int | str, ...] = tuple(layers) if isinstance(layers, list | tuple | range) else (layers,)
    if not found or any(isinstance(one, bool) or not isinstance(one, int | str) for one in found):
        raise ClearheadError(
            f"{who}: layers is {layers!r}; expected modules' names or patterns of them, such as 'layers.3.*', or "
            "their numbers in the order in which they call attention."
        )
    return found


def check_layers(layers: tuple[int | str, ...] | None, modules: dict[str, int], who: str) -> None:
    """Raise where one is none of the modules that made calls, which have these numbers."""
    missing = [one for one in layers or () if not any(fits(one, name, number) for name, number in modules.items())]
    if missing:
        raise ClearheadError(
            f"{who}: no call was made by a module {', '.join(map(repr, missing))} of layers; calls were made by "
            f"{listed(modules)}, numbered from 0. A pattern is one of the whole name, such as '*.layers.3.*'."
        )


def checked_heads(heads: Any, who: str) -> Heads:
    if heads is not None and not _are_heads(heads):
        raise ClearheadError(f"{who}: heads is {heads!r}; expected a number, a slice, or some numbers.")
    found: Heads = heads
    return found


def _are_heads(heads: Any) -> bool:
    if isinstance(heads, slice):
        numbers = [part for part in (heads.start, heads.stop, heads.step) if part is not None]
    else:
        numbers = list(heads) if isinstance(heads, list | tuple | range) else [heads]
    whole = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
    return whole and not (isinstance(heads, slice) and heads.step == 0)


def numbers_of(heads: Heads, count: int, name: str, who: str) -> tuple[int, ...]:
    """The numbers of the heads that are asked for."""
    if heads is None:
        return tuple(range(count))
    if isinstance(heads, slice):
        found: Iterable[int] = range(count)[heads]
    else:
        found = [heads] if isinstance(heads, int) else heads
    numbers = list(found)
    if not numbers or not all(-count <= number < count for number in numbers):
        raise ClearheadError(f"{who}: heads is {heads!r}, and {name} has {count} heads, numbered from 0.")
    return tuple(range(count)[number] for number in numbers)


def runs_of(numbers: tuple[int, ...]) -> list[slice]:
    """The same as slices, as few as there can be."""
    runs = [slice(numbers[0], numbers[0] + 1)] if numbers else [slice(0, 0)]
    for number in numbers[1:]:
        if number == runs[-1].stop:
            runs[-1] = slice(runs[-1].start, number + 1)
        else:
            runs.append(slice(number, number + 1))
    return runs
