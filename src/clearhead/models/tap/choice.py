"""Which layers, which of their heads, and which positions."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.text import listed
from clearhead.base.tracing import readable

Layers = int | str | Sequence[int | str] | None
Heads = int | slice | Sequence[int] | None
Positions = int | slice | Sequence[int] | None


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


def checked_positions(positions: Any, name: str) -> tuple[int, ...] | slice | None:
    if positions is None:
        return None
    numbers = isinstance(positions, Tensor) and positions.layout == torch.strided and readable(positions)
    if numbers or isinstance(positions, np.ndarray):
        positions = positions.tolist()
    try:
        if isinstance(positions, slice):
            range(0)[positions]  # raises for what is no slice of positions
            return positions
        listed = positions if isinstance(positions, list | tuple | range) else (positions,)
        if listed and not any(isinstance(one, bool | np.bool_) for one in listed):
            return tuple(operator.index(one) for one in listed)
    except (TypeError, ValueError):
        pass
    raise ClearheadError(f"{name} is {positions!r:.60}; expected a position, a slice, or some positions.")


def chosen(positions: tuple[int, ...] | slice | None, places: range, filled: int) -> np.ndarray:
    """Which of these places are among the positions, bool. `filled`: positions so far, from which negative ones count.

    Positions that are not among the places are others' to change.
    """
    if positions is None:
        return np.ones(len(places), dtype=bool)
    if isinstance(positions, slice):
        inside = range(filled)[positions]
        return np.fromiter((p in inside for p in places), dtype=bool, count=len(places))
    absolute = [p + filled if p < 0 else p for p in positions]
    return np.isin(np.asarray(places), absolute)
