"""The operations of expressions that only move numbers: each place of the result is a place of an input.

See `operations.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch

from clearhead.base.symbolic.expressions import OPERATIONS, Expression, Operand, Operation, call, code_of, written
from clearhead.base.symbolic.formulas import (
    ATOM,
    COMPARE,
    CONDITION,
    Place,
    Places,
    Text,
    View,
    apart,
    joined,
    letter,
    moved,
)


def fit(places: Places, x: Any, view: View) -> Places:
    """The places in an input, which is repeated along some axes, for these places of the result."""
    if not isinstance(x, Operand):
        return ()
    mine = places[len(places) - x.ndim :] if x.ndim else ()
    return [0 if n == 1 else p for p, n in zip(mine, x.shape, strict=True)] if view.numbers else mine


def method(name: str) -> Callable[[Expression], Text]:
    """`a.name(…)`"""

    def text(x: Expression) -> Text:
        first, *others = map(code_of, x.inputs)
        return Text(ATOM, f"{first.inside(ATOM)}.{name}({_arguments(others, x)})")

    return text


def torch_function(name: str) -> Callable[[Expression], Text]:
    """`torch.name(…)`"""
    return lambda x: Text(ATOM, f"{name}({_arguments(map(code_of, x.inputs), x)})")


def _arguments(inputs: Iterable[Text], x: Expression) -> str:
    options = (f"{name}={code_of(each).text}" for name, each in x.options.items())
    return ", ".join([*(each.text for each in inputs), *options])


def _moved(compute: Any, text: Any, source: Any, axes: Any, back: Any = None) -> Operation:
    """An operation that only moves numbers: `source(x, places)` gives the places in its first input."""
    return Operation(compute, text, lambda x, places, view: written(x.inputs[0], source(x, places), view), axes, back)


def axis_of(x: Expression) -> int:
    return int(x.inputs[1] % x.inputs[0].ndim)


def _swapped(x: Expression, items: Any) -> Any:
    first, second = x.inputs[1:] or (-2, -1)
    found = list(items)
    found[first], found[second] = found[second], found[first]
    return tuple(found)


def _unsqueezed_at(x: Expression) -> int:
    return int(x.inputs[1] % x.ndim)


def entries(x: Expression) -> list[Any]:
    """The part of an index for each axis of its input."""
    given, ndim = list(x.inputs[1:]), x.inputs[0].ndim
    gap = given.index(Ellipsis) if Ellipsis in given else len(given)
    rest = given[gap + 1 :]
    return [*given[:gap], *[slice(None)] * (ndim - gap - len(rest)), *rest]


def _index_source(x: Expression, places: Places) -> Places:
    left = list(places)
    found: list[Place] = []
    for entry in entries(x):
        if isinstance(entry, int):
            found.append(entry)
            continue
        place = left.pop(0)
        if isinstance(entry, slice):
            found.append(moved(place, entry.step or 1, entry.start or 0))
        else:
            found.append(entry[place] if isinstance(place, int) else letter(f"{entry}[{place}]"))
    return found


def _index_axes(x: Expression) -> tuple[str, ...]:
    return tuple(axis for axis, entry in zip(x.inputs[0].axes, entries(x), strict=True) if not isinstance(entry, int))


def _index_code(x: Expression) -> Text:
    def part(entry: Any) -> str:
        if isinstance(entry, slice):
            ends = ["" if end is None else str(end) for end in (entry.start, entry.stop, entry.step)]
            return ":".join(ends if entry.step else ends[:2])
        return "..." if entry is Ellipsis else str(entry)

    return Text(ATOM, f"{code_of(x.inputs[0]).inside(ATOM)}[{', '.join(map(part, x.inputs[1:]))}]")


def _flat_source(x: Expression, places: Places) -> Places:
    inner = x.inputs[0].shape
    start = x.inputs[1] % len(inner)
    return [*places[:start], *apart(places[start], inner[start:])]


def _flat_axes(x: Expression) -> tuple[str, ...]:
    inner, start = x.inputs[0], x.inputs[1] % x.inputs[0].ndim
    return (*inner.axes[:start], inner.axes[-1])


def _flat_back(x: Expression, d: Operand, out: Operand) -> list[Operand]:
    inner = x.inputs[0]
    start = x.inputs[1] % inner.ndim
    return [call("unflatten", d, start, tuple(inner.shape[start:]), axes=inner.axes)]


def _beside(places: Places, axis: int, parts: Sequence[tuple[int, Any]]) -> Text:
    """The text of one of several parts, (number of entries, text of a place), that follow each other along an axis."""
    place, start = places[axis], 0
    found: list[tuple[str, int, int]] = []
    for size, write in parts:
        text = None
        if not isinstance(place, int) or start <= place < start + size:
            text = write([*places[:axis], moved(place, 1, -start), *places[axis + 1 :]])
        if text is not None and isinstance(place, int):
            return Text(*text)
        if text is not None:
            words, first = text.inside(COMPARE), start
            if found and found[-1][0] == words:
                first = found.pop()[1]
            found.append((words, first, start + size))
        start += size
    return Text(CONDITION, ", ".join(_ranged(str(place), start, *each) for each in found))


def _ranged(place: str, size: int, text: str, first: int, end: int) -> str:
    """A text that holds for a part of the places along an axis."""
    if (first, end) == (0, size):
        return text
    if not first:
        return f"{text} for {place} < {end}"
    return f"{text} for {place} from {first}" + f" to {end - 1}" * (end < size)


def _cat_write(x: Expression, places: Places, view: View) -> Text:
    each, axis = x.inputs[0], x.inputs[1] % x.ndim
    parts = [(one.shape[axis], lambda inner, one=one: written(one, fit(inner, one, view), view)) for one in each]
    return _beside(places, axis, parts)


def _stack_write(x: Expression, places: Places, view: View) -> Text:
    each, axis = x.inputs[0], x.inputs[1] % x.ndim
    rest = [*places[:axis], *places[axis + 1 :]]
    return _beside(places, axis, [(1, lambda _, one=one: written(one, fit(rest, one, view), view)) for one in each])


def _pad_write(x: Expression, places: Places, view: View) -> Text:
    inner, (_, after) = x.inputs
    parts = [
        (inner.shape[-1], lambda at: written(inner, fit(at, inner, view), view)),
        (after, lambda _: Text(ATOM, "0")),
    ]
    return _beside(places, x.ndim - 1, parts)


def _listed_axes(x: Expression) -> tuple[str, ...]:
    inner = x.inputs[0][0]
    if x.name == "cat":
        return tuple(inner.axes)
    axis = x.inputs[1] % x.ndim
    return (*inner.axes[:axis], "1", *inner.axes[axis:])


def _joined_source(x: Expression, places: Places) -> Places:
    axis, sizes = axis_of(x), x.inputs[2]
    return [*places[:axis], joined(places[axis : axis + len(sizes)], sizes), *places[axis + len(sizes) :]]


def _turned(name: str) -> Operation:
    """The attribute of a tensor that exchanges its last two axes."""
    return _moved(
        attrgetter(name),
        lambda x: Text(ATOM, f"{code_of(x.inputs[0]).inside(ATOM)}.{name}"),
        _swapped,
        lambda x: _swapped(x, x.inputs[0].axes),
        lambda x, d, out: [d.mT],
    )


def _cast(compute: Any, name: str) -> Operation:
    """The method that gives the same numbers in another type."""
    return _moved(compute, method(name), lambda x, places: places, lambda x: x.inputs[0].axes, lambda x, d, out: [d])


OPERATIONS |= {
    "mT": _turned("mT"), "T": _turned("T"),
    "transpose": _moved(
        torch.transpose, method("transpose"), _swapped, lambda x: _swapped(x, x.inputs[0].axes),
        lambda x, d, out: [d.transpose(*x.inputs[1:])],
    ),
    "unsqueeze": _moved(
        torch.unsqueeze, method("unsqueeze"),
        lambda x, places: [*places[: _unsqueezed_at(x)], *places[_unsqueezed_at(x) + 1 :]],
        lambda x: (*x.inputs[0].axes[: _unsqueezed_at(x)], "1", *x.inputs[0].axes[_unsqueezed_at(x) :]),
        lambda x, d, out: [d.squeeze(_unsqueezed_at(x))],
    ),
    "squeeze": _moved(
        torch.squeeze, method("squeeze"), lambda x, places: [*places[: axis_of(x)], 0, *places[axis_of(x) :]],
        lambda x: (*x.inputs[0].axes[: axis_of(x)], *x.inputs[0].axes[axis_of(x) + 1 :]),
        lambda x, d, out: [d.unsqueeze(axis_of(x))],
    ),
    "unflatten": _moved(
        lambda a, dim, sizes: a.unflatten(dim, sizes), method("unflatten"),
        lambda x, places: _joined_source(x, places), lambda x: x.inputs[0].axes,
    ),
    "flatten": _moved(torch.flatten, method("flatten"), _flat_source, _flat_axes, _flat_back),
    "index": _moved(lambda a, *places: a[places], _index_code, _index_source, _index_axes),
    "to": _cast(lambda a, kind: a.to(kind), "to"), "double": _cast(lambda a: a.double(), "double"),
    "cat": Operation(torch.cat, torch_function("torch.cat"), _cat_write, _listed_axes),
    "stack": Operation(torch.stack, torch_function("torch.stack"), _stack_write, _listed_axes),
    "pad": Operation(
        torch.nn.functional.pad, torch_function("torch.nn.functional.pad"), _pad_write, lambda x: x.inputs[0].axes
    ),
    "repeat": _moved(
        lambda a, times: a.repeat(times), method("repeat"),
        lambda x, places: apart(places[0], [x.inputs[1], x.inputs[0].shape[0]])[1:], lambda x: x.inputs[0].axes,
    ),
    "repeat_interleave": _moved(
        lambda a, times: a.repeat_interleave(times), method("repeat_interleave"),
        lambda x, places: apart(places[0], [x.inputs[0].shape[0], x.inputs[1]])[:1], lambda x: x.inputs[0].axes,
    ),
    "arange": Operation(
        torch.arange,
        lambda x: Text(ATOM, f"torch.arange({', '.join(map(str, x.inputs))})"),
        lambda x, places, view: Text(ATOM, str(moved(places[0], x.inputs[2], x.inputs[0]))),
        lambda x: ("n",),
    ),
}  # fmt: skip
