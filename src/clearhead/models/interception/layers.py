"""The layer of its model that a call of attention belongs to."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from itertools import zip_longest
from typing import NamedTuple

from clearhead.models.interception.modules import Kind

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a module's name that is a number


class LayerName(NamedTuple):
    """A layer as a person calls it: "L3", or "encoder 3" and "decoder 3, cross" where a model has several stacks.

    `number`: of the layer in its stack, from 0 on. `stack`: the name of the stack; "" where there is only one stack.
    `cross`: whether the attention is the layer's cross attention.
    """

    number: int = 0
    stack: str = ""
    cross: bool = False

    @property
    def column(self) -> int | str:
        """The entry of a table: the number where there is only one stack, else the name. `layers=` takes either."""
        return str(self) if self.stack else self.number

    def __str__(self) -> str:
        return (f"{self.stack} {self.number}" if self.stack else f"L{self.number}") + ", cross" * self.cross


FIRST = LayerName()


class Site(NamedTuple):
    """Where a call is made: the module's name, its layer, and how many layers the stack has, None while unknown."""

    name: str
    layer: LayerName
    total: int | None

    @property
    def kind(self) -> Kind:
        return "cross" if self.layer.cross else "self"


class _Known(NamedTuple):
    """A module's layer, as far as the names of the model's modules show it.

    `number`: of the layer. `total`: how many layers there are. `stack`: the short name of the stack. `alike`: the
    module's name with * for each number.
    """

    alike: str
    number: int | None
    total: int | None
    stack: str


class Layers:
    """The layers of a model, by the names of its modules.

    `classes`: the names of all modules with their classes. A layer's number stands in the name of its module: in
    "decoder.block.3.layer.1.EncDecAttention" it is 3, because modules of this name differ in the first number and have
    the same second one. Where two numbers differ ("stages.1.blocks.0.attn"), and where a name has no number, layers are
    counted. A module that is called again in the same run of the model is another layer with the same parameters,
    counted after the others. The name of a stack is the part before the first number in the names of attention
    modules.
    """

    def __init__(self, classes: Mapping[str, str]) -> None:
        self._classes = classes
        self._known: dict[str, _Known] = {}  # by module
        self._numbers: dict[str, dict[tuple[str, int], int]] = {}
        self._lock = threading.Lock()
        self._alike: dict[tuple[str, str | None], set[tuple[int, ...]]] = {}
        self._short: dict[tuple[str, str], str] = {}

    def site(self, name: str, cross: bool, turns: dict[str, int], *, made: bool = True) -> Site:
        """Where the next call of this module in its run is made. `turns`: how many calls each module has made in the
        run. `made`: whether the call is made now, and counted."""
        if name not in self._known:
            self._known[name] = self._read(name)
        known = self._known[name]
        with self._lock:
            turn = turns.get(name, 0)
            numbers = self._numbers.setdefault(known.alike, {})
            number = numbers.get((name, turn))
            repeated = turn > 0 or any(others > 0 for _, others in numbers)
            if number is None:
                counted = known.number is None or repeated
                # a module without a number comes after all that have one
                taken = [numbers] if known.alike else self._numbers.values()
                number = known.number
                if counted:
                    number = max((n for each in taken for n in each.values()), default=-1) + 1
            if made:
                turns[name] = turn + 1
                numbers[name, turn] = number  # type: ignore[assignment]
        assert number is not None
        return Site(name, LayerName(number, known.stack, cross), None if repeated else known.total)

    def repeats(self, name: str) -> bool:
        """Whether this module was called several times in a run of the model."""
        with self._lock:
            return any(called == name and turn > 0 for each in self._numbers.values() for called, turn in each)

    def _read(self, name: str) -> _Known:
        parts = name.split(".")
        places = [place for place, part in enumerate(parts) if part.isdecimal()]
        if not places:
            return _Known("", None, None, "")
        alike, mine = _starred(name), tuple(int(parts[place]) for place in places)
        of = alike, self._classes.get(name)
        if of not in self._alike:
            self._alike[of] = self._numbers_alike(*of)
        numbers = sorted(self._alike[of] | {mine})
        differ = [place for place, each in enumerate(zip(*numbers, strict=True)) if len(set(each)) > 1] or [0]
        stack = ".".join(parts[: places[0]]), self._classes.get(name, "")
        if stack not in self._short:
            self._short[stack] = self._named(*stack)
        if len(differ) > 1:
            return _Known(alike, numbers.index(mine), len(numbers), self._short[stack])
        return _Known(alike, mine[differ[0]], 1 + max(each[differ[0]] for each in numbers), self._short[stack])

    def _numbers_alike(self, alike: str, own: str | None) -> set[tuple[int, ...]]:
        """The numbers in the names of all modules of this class whose names are alike."""
        behind = alike.rpartition("*")[2]
        return {
            tuple(int(part) for part in other.split(".") if part.isdecimal())
            for other, kind in self._classes.items()
            if kind == own and other.endswith(behind) and _starred(other) == alike
        }

    def _named(self, stack: str, kind: str) -> str:
        """A short name of a stack, which the model's other stacks do not have; "" where there is no other."""
        attends = {own: own == kind or "attention" in own.lower() or "Attn" in own for own in self._classes.values()}
        parts = (_starred(name).partition("*") for name, own in self._classes.items() if attends[own])
        others = {before.rstrip(".") for before, number, _ in parts if number} - {stack}
        if not others or not stack:
            return ""
        own = stack.split(".")
        apart = [_apart(own, other.split(".")) for other in others]
        return ".".join(own[min(apart) : max(apart) + 1]) or stack


def _starred(name: str) -> str:
    return NUMBER.sub("*", name)


def _apart(own: list[str], other: list[str]) -> int:
    """The first place at which two paths differ."""
    return next(place for place, (a, b) in enumerate(zip_longest(own, other)) if a != b)
