"""What a watch gives: calls, by number, by module and by run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Generic, Protocol, Self, TypeVar, overload

import numpy as np

from clearhead.base.errors import ClearheadError
from clearhead.base.text import listed
from clearhead.models.attention_call import AttentionCall


class AnyCall(Protocol):
    """What all calls have: the module's name, the kind of attention, and which run of the model made them."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def run(self) -> int: ...


Call = TypeVar("Call", bound=AnyCall)


class Calls(Generic[Call]):
    """The attention calls of a watched model.

    `calls`, in order; `seen[3]`, one of them; `seen["encoder.layer.3.attention.self"]`, those of one module, in order,
    or of all whose names fit a pattern, `seen["*.layer.3.*"]`; iterating gives the calls. `names`: those of the
    modules. `runs`: the same apart for each run of the model.
    """

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls

    @overload
    def __getitem__(self, which: int) -> Call: ...

    @overload
    def __getitem__(self, which: str | slice) -> list[Call]: ...

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return self.calls[which]
        if isinstance(which, int | np.integer) and not isinstance(which, bool):
            if not -len(self.calls) <= which < len(self.calls):
                raise ClearheadError(f"there is no call {which}: {len(self.calls)} were seen.")
            return self.calls[which]
        found = [call for call in self.calls if call.name == which]
        found = found or [call for call in self.calls if isinstance(which, str) and fnmatchcase(call.name, which)]
        if not found:
            raise ClearheadError(f"no attention call of a module {which!r} was seen; there are {listed(self.names)}.")
        return found

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def names(self) -> list[str]:
        """The names of the modules that made calls, in the order of their first calls."""
        return list(dict.fromkeys(call.name for call in self.calls))

    def __repr__(self) -> str:
        kinds = [call.kind for call in self.calls]
        counts = f"{len(self.calls)} calls, {kinds.count('self')} self and {kinds.count('cross')} cross"
        return f"{type(self).__name__}({counts})"

    @property
    def runs(self) -> list[Self]:
        """The calls of each run of the model, in order: of each time that it, or a module of it, was called."""
        found: dict[int, list[Call]] = {}
        for call in self.calls:
            found.setdefault(call.run, []).append(call)
        return [type(self)(calls) for calls in found.values()]


def labels(calls: Sequence[AttentionCall]) -> list[str]:
    """The layer "L3" for its one call of layer 3, and "L3.0", "L3.1", … where a layer made several, as in a generation.

    Layers are numbered in the order in which they first call attention. A module that is called again in the same run,
    and continues no keys, is another layer with the same parameters (ALBERT).
    """
    turns: Counter[tuple[int, str]] = Counter()
    layers = []
    for call in calls:
        run = call.run, call.name
        turns[run] += int(not turns[run] or not call.cached_key.number)
        layers.append((call.name, turns[run]))
    numbers = {layer: number for number, layer in enumerate(dict.fromkeys(layers))}
    counts, made = Counter(layers), Counter[tuple[str, int]]()
    found = []
    for layer in layers:
        found.append(f"L{numbers[layer]}" + (f".{made[layer]}" if counts[layer] > 1 else ""))
        made[layer] += 1
    return found
