"""Choices of layers, of heads and of positions: they are checked, and compared with the layers that made calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

import numpy as np

from clearhead.base.errors import ClearheadError
from clearhead.base.output.text import brief
from clearhead.base.selected import checked_numbers, is_number, is_slice, items_of, numbers_of
from clearhead.models.interception.layers import Site

Layers = int | slice | str | Sequence[int | slice | str] | None
Pairs = tuple[Sequence[int], Sequence[int]]  # positions of one text, and those of another that correspond
Heads = int | slice | Sequence[int | slice] | None
Positions = int | slice | Sequence[int | slice] | None

Item = int | slice | str  # of a choice of layers
PATTERNS = "A pattern has to fit the whole name, such as '*.layers.3.*'."


def checked_layers(layers: Any, who: str) -> tuple[Item, ...] | None:
    """The parts of the argument `layers`, or `layer`, of the function `who`; None for all layers."""
    if layers is None:
        return None
    found = items_of(layers)
    if not found or not all(is_number(one) or is_slice(one) or isinstance(one, str) for one in found):
        raise ClearheadError(f"{who}: layers is {brief(layers)}; expected numbers, slices, names, patterns, or a list.")
    return found


def fits(item: Item, site: Site, who: str) -> bool:
    """Whether a part of a choice of layers means this layer."""
    if isinstance(item, str):
        said = str(site.layer)
        return item in (site.name, said) or fnmatchcase(site.name, item) or fnmatchcase(said, item)
    number = site.layer.number
    if isinstance(item, int) and item >= 0:
        return number == item
    if isinstance(item, slice) and (item.stop is None or item.stop >= 0) and (item.start or 0) >= 0:
        step = item.step or 1
        if step > 0:
            return number in range(item.start or 0, number + 1 if item.stop is None else item.stop, step)
    if site.total is None:
        raise ClearheadError(
            f"{who}: layers has {item!r}, which counts from the last layer, and the name of {site.name} does not say "
            "how many layers there are. Pass numbers from 0 on."
        )
    inside = range(site.total)
    return number in inside[item] if isinstance(item, slice) else number == item + site.total


def chooses(layers: tuple[Item, ...] | None, site: Site, who: str) -> bool:
    """Whether this layer is among the chosen ones; None chooses all."""
    return layers is None or any(fits(item, site, who) for item in layers)


def check_layers(layers: tuple[Item, ...] | None, sites: Collection[Site], who: str) -> None:
    """Raise where a part of a choice means none of the layers that made calls."""
    missing = [one for one in layers or () if not any(fits(one, site, who) for site in sites)]
    if missing:
        raise ClearheadError(
            f"{who}: no call was made by a layer {', '.join(map(repr, missing))}; calls were made by {made_by(sites)}, "
            f"numbered from 0. {PATTERNS}"
        )


def made_by(sites: Collection[Site]) -> str:
    """The layers that made calls, in words."""
    named = dict.fromkeys((site.name, str(site.layer)) for site in sites)
    shown = [f"{name!r} ({layer})" for name, layer in list(named)[:6]]
    return ", ".join(shown + ["…"] * (len(named) > 6)) or "none"


def heads_of(heads: Any, count: int, name: str, who: str) -> tuple[int, ...]:
    """The numbers of the heads that are asked for, of `count` heads of the module `name`."""
    return numbers_of(heads, count, f"{who}: heads", f"{name} has {count} heads")


def runs_of(numbers: tuple[int, ...]) -> list[slice]:
    """Numbers as slices of ascending neighbours, in the given order."""
    groups = groupby(enumerate(numbers), lambda numbered: numbered[1] - numbered[0])
    runs = [[number for _, number in group] for _, group in groups]
    return [slice(run[0], run[-1] + 1) for run in runs] or [slice(0, 0)]


def checked_positions(positions: Any, name: str) -> tuple[int | slice, ...] | None:
    return None if positions is None else checked_numbers(positions, name)


def chosen(positions: tuple[int | slice, ...] | None, places: range, filled: int) -> np.ndarray:
    """Which of these places are among the positions, bool. Negative positions count back from `filled`.

    Positions that are not among the places belong to other calls.
    """
    if positions is None:
        return np.ones(len(places), dtype=bool)
    found = np.zeros(len(places), dtype=bool)
    for one in positions:
        inside = range(filled)[one] if isinstance(one, slice) else [one + filled if one < 0 else one]
        found |= np.fromiter((place in inside for place in places), dtype=bool, count=len(places))
    return found
