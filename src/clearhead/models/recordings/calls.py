"""Lists of calls: by number, by module and by run, with a name for each call, and numbers of their heads shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar, cast, overload

import numpy as np
from torch import Tensor

from clearhead.base.errors import ClearheadError, UnsupportedError
from clearhead.base.output.pictures import Axes, Colormap, Panel, Side, Style, draw
from clearhead.base.output.text import brief, escaped, listed
from clearhead.base.output.thumbnails import table as html_table
from clearhead.base.selected import numbers_of
from clearhead.models.interception.choice import PATTERNS, Item, checked_layers, fits, made_by
from clearhead.models.interception.layers import LayerName, Site
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.models.recordings.call import COLUMNS
from clearhead.models.table import Table

Seen = TypeVar("Seen", bound=Any)  # it has the name of its module, its kind, and the run of the model that made it


class Calls(Generic[Seen]):
    """The attention calls of a watched model, in order: see `Recording`."""

    _listed: ClassVar[tuple[str, ...]] = "module", "kind", "run"  # the columns of a notebook, after call and layer

    def __init__(self, calls: list[Seen], missing: Mapping[Site, str] | None = None) -> None:
        """`missing`: layers whose calls could not be recorded, each with the reason."""
        self.calls = calls
        self.missing = {} if missing is None else missing

    @overload
    def __getitem__(self, which: int) -> Seen: ...

    @overload
    def __getitem__(self, which: str | slice) -> list[Seen]: ...

    def __getitem__(self, which: Any) -> Any:
        if not isinstance(which, str):
            if not self.calls:
                self.check_complete(f"call {which}")
            return self.calls[which]
        for site, reason in self.missing.items():
            if fits(which, site, "calls"):
                raise UnsupportedError(f"{site.name} ({site.layer}) was left out of the record: {reason}")
        found = [call for call in self.calls if call.name == which]
        who = f"{type(self).__name__}[…]"
        return found or [self.calls[number] for number in chosen_calls(self.calls, which, who)]

    def __iter__(self) -> Iterator[Seen]:
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
        missing = f"; without {listed(dict.fromkeys(site.name for site in self.missing))}" if self.missing else ""
        return f"{type(self).__name__}({counts}{missing})"

    def check_complete(self, who: str) -> None:
        """Raise where a layer was left out. `who`: what needs every layer."""
        for site, reason in self.missing.items():
            raise UnsupportedError(
                f"{who} needs every layer, and a call of {site.name} ({site.layer}) was left out: {reason}\n"
                f"To take the other calls alone, pass ch.models.{type(self).__name__}(seen.calls)."
            )

    @property
    def runs(self) -> list[Self]:
        """The calls of each run of the model, in order. A run is one call of the model, or of a module of it."""
        found: dict[int, list[Seen]] = {}
        for call in self.calls:
            found.setdefault(call.run, []).append(call)
        return [type(self)(calls, self.missing) for calls in found.values()]

    def table(self) -> Table:
        """A row for each call and head, or for each call, as `pandas.DataFrame` takes them."""
        return Table(row for call in self.calls for row in call.table())

    @property
    def _labels(self) -> list[Label]:
        """The name of each call."""
        apart = parts_apart([(call.layer, call.name) for call in self.calls])
        return [Label(call.layer, part) for call, part in zip(self.calls, apart, strict=True)]

    def _repr_html_(self) -> str:
        """The first 40 calls as a table, for notebooks."""
        named = enumerate(zip(self._labels, self.calls, strict=True))
        rows = [[number, label, *(COLUMNS[name](call) for name in self._listed)] for number, (label, call) in named]
        markup = html_table(["call", "layer", *self._listed], rows)
        return f"<div><p><code>{escaped(repr(self))}</code></p>{markup}</div>"


class HeadNumbers:
    """A number for each head: `values`, (calls, heads), NaN where a call has no such head, and their picture.

    `name`, `unit`, `sentence`: what the numbers are.
    """

    name: str
    unit: str
    sentence: str
    values: Tensor
    _labels: list[Label]
    _meaning: str  # of a number, for the bar of the picture
    _colour_map = "RdBu"
    _scale = "signed"

    @property
    def _layers(self) -> list[int | str]:
        """The layer of each row of the values."""
        return [label.layer.column for label in self._labels]

    def _strongest(self) -> dict[str, float]:
        """The three numbers that are largest in size, by the names of their heads."""
        values, names = self.values.detach().cpu(), self._labels
        sizes = values.abs().nan_to_num(-1.0)
        order = sizes.flatten().argsort(descending=True, stable=True)[:3].tolist()
        places = [divmod(place, sizes.shape[1]) for place in order]
        return {names[call].head(head): float(values[call, head]) for call, head in places if sizes[call, head] >= 0}

    def _picture(self) -> tuple[np.ndarray, Side, Side]:
        """The cells of the picture, and its two sides."""
        cells, names = self.values.detach().cpu().double().numpy(), list(map(str, self._labels))
        return cells, Side("call", len(names), names), Side("head", cells.shape[1])

    def plot(
        self, *, title: str | None = None, cmap: str | Colormap | None = None, ax: Axes | None = None, bar: bool = True
    ) -> Axes:
        """A picture of the numbers, with calls or layers in rows.

        `title`, `cmap`, `ax`, `bar`: as for `Weights.plot`. Numbers with a sign are blue above 0 and red below; of
        others the larger ones are darker. Needs matplotlib. Gives the axes.
        """
        cells, down, across = self._picture()
        style = Style(title, self._colour_map if cmap is None else cmap, self._scale, ax, bar)
        return cast("Axes", draw([Panel(cells, np.isnan(cells))], down, across, style, self._meaning))


class Label(NamedTuple):
    """The name of a call in its recording, which no other call there has: "L3", "decoder 3, cross, step 2".

    `layer`: such as "L3". Calls of one layer differ in the other fields: `part` of the module's name, where several
    modules attend in one layer; `run` of the model; `step` of a generation; and `call`, its number, where they would be
    equal without it.
    """

    layer: LayerName
    part: str = ""
    run: int | None = None
    step: int | None = None
    call: int | None = None

    @property
    def more(self) -> list[str]:
        numbers = ("run", self.run), ("step", self.step), ("call", self.call)
        return [*[self.part] * bool(self.part), *(f"{name} {n}" for name, n in numbers if n is not None)]

    def head(self, number: int) -> str:
        """The name of a head: "L3H5", "L3H5, step 2", "decoder 3, cross, head 5, step 2"."""
        if not self.layer.stack:
            first = f"L{self.layer.number}H{number}"
            return ", ".join([first, *["cross"] * self.layer.cross, *self.more])
        return ", ".join([str(self.layer), f"head {number}", *self.more])

    def __str__(self) -> str:
        return ", ".join([str(self.layer), *self.more])


def labels(calls: Sequence[AttentionCall]) -> list[Label]:
    """The name of each call. Where a layer made several calls, the name has the run of the model that made the call,
    or, in a generation, whose calls each continue the keys of the call before, the step: 0 is the prompt."""
    apart = parts_apart([(call.layer, call.name) for call in calls])
    by_layer: dict[tuple[Any, ...], list[AttentionCall]] = {}
    for call, part in zip(calls, apart, strict=True):
        by_layer.setdefault((call.layer, part), []).append(call)
    when: dict[int, tuple[int | None, int | None]] = {}
    for same in by_layer.values():
        began = [call for call in same if not call.cached_key.number]
        first = {call.cached_key.chain: call for call in reversed(began)}
        several = len({call.cached_key.chain for call in same}) > 1
        others = _others(same)
        for call, between in zip(same, others, strict=True):
            chain, number = call.cached_key
            start = first.get(chain)
            step = None
            if number or sum(other.cached_key.chain is chain for other in same) > 1:
                # where every k-th run is recorded, one call is k steps after the other
                step = number if start is None else max(call.run - start.run - between, number)
            when[id(call)] = call.run if several else None, step
    found: list[Label] = []
    for number, (call, part) in enumerate(zip(calls, apart, strict=True)):
        label = Label(call.layer, part, *when[id(call)])
        if label in found:  # the list of calls was put together by hand
            label = label._replace(call=number)
        found.append(label)
    return found


def _others(same: list[AttentionCall]) -> list[int]:
    """For each call how many calls of other generations came after the first call of its own."""
    began: dict[Any, int] = {}
    own: dict[Any, int] = {}
    found = []
    for place, call in enumerate(same):
        chain = call.cached_key.chain
        own[chain] = own.get(chain, -1) + 1
        found.append(place - began.setdefault(chain, place) - own[chain])
    return found


def parts_apart(layers: Sequence[tuple[LayerName, str]]) -> list[str]:
    """For each layer and module, the part of the module's name by which modules of one layer differ, or ""."""
    names: dict[LayerName, dict[str, None]] = {}
    for layer, name in layers:
        names.setdefault(layer, {})[name] = None
    return [_part(name, list(names[layer])) if len(names[layer]) > 1 else "" for layer, name in layers]


def _part(name: str, names: Sequence[str]) -> str:
    parts = name.split(".")
    for place, part in enumerate(parts):
        if len({other.split(".")[place] for other in names if other.count(".") >= place}) > 1:
            return name if part.isdecimal() else part
    return name


def chosen_calls(calls: Sequence[Any], layers: Any, who: str) -> list[int]:
    """The numbers of the calls that a choice of layers means, in their order: see `Recording.view`."""
    items = checked_layers(layers, who)
    if items is None:
        return list(range(len(calls)))
    counts: dict[str, int] = {}
    for call in calls:
        counts[call.layer.stack] = max(counts.get(call.layer.stack, 0), call.layer.number + 1)
    sites = [Site(call.name, call.layer, counts[call.layer.stack]) for call in calls]
    recorded = all(isinstance(call, AttentionCall) for call in calls)  # others do not know the step of a generation
    said = list(map(str, labels(calls))) if recorded else [str(call.layer) for call in calls]

    def meant(item: Item, number: int) -> bool:
        return fits(item, sites[number], who) or (isinstance(item, str) and fnmatchcase(said[number], item))

    for item in items:
        if not any(meant(item, number) for number in range(len(calls))):
            raise ClearheadError(
                f"{who}: there is no layer {brief(item, 80)}; calls were made by {made_by(sites)}, numbered from "
                f"0. {PATTERNS}"
            )
    return [number for number in range(len(calls)) if any(meant(item, number) for item in items)]


def one_call(calls: Sequence[AttentionCall], layer: Any, step: int | None, who: str) -> int:
    """The number of the call that a layer, and a step of a generation, name; raises where they name several."""
    found, said = chosen_calls(calls, layer, who), labels(calls)
    if step is not None:
        turns = Counter[tuple[LayerName, str]]()
        steps = {}
        for place in found:  # where the step of a call is unknown, its number among the calls of its layer counts
            which = calls[place].layer, calls[place].name
            known = said[place].step
            steps[place] = turns[which] if known is None else known
            turns[which] += 1
        count = 1 + max(steps.values())
        (at,) = numbers_of([step], count, f"{who}: step", f"there are {count} steps")
        found = [place for place in found if steps[place] == at]
    if len(found) != 1:
        by_step = step is None and len({calls[place].layer for place in found}) < len(found)
        raise ClearheadError(
            f"{who}: {brief(layer)} means {len(found)} calls; pass {'step=, and ' * by_step}a layer that means one: "
            f"{listed(str(said[place]) for place in found)}."
        )
    return found[0]
