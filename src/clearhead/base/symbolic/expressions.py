"""Expressions: a computation as a tree, written with operators. Each step of an explanation is an expression.

The tree gives its value, its formula in letters, its line of PyTorch, the numbers that make one place of it, the
program that a page computes, and the formula of its gradient. Each operation is one entry of `OPERATIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.base.symbolic.formulas import (
    ATOM,
    UNARY,
    Linear,
    Places,
    Text,
    View,
    joined,
    letter,
    moved,
    number_at,
    numeral,
)


def _operator(name: str, reflected: bool = False) -> Callable[..., Expression]:
    """A method that makes an expression of this operation; `reflected`: its own object is on the right."""
    return lambda *operands: call(name, *(operands[::-1] if reflected else operands))


class Operand:
    """An object of which operators make expressions. `value`: its numbers. `axes`: the name of each dimension."""

    value: Tensor
    axes: tuple[str, ...]

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def mT(self) -> Expression:
        return call("mT", self)

    @property
    def T(self) -> Expression:
        return call("T", self)

    def __getitem__(self, places: Any) -> Expression:
        return call("index", self, *(places if isinstance(places, tuple) else (places,)))

    def __getattr__(self, name: str) -> Callable[..., Expression]:
        if name not in OPERATIONS:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return lambda *inputs, **options: call(name, self, *inputs, **options)

    __add__, __sub__, __mul__, __matmul__ = map(_operator, ("add", "sub", "mul", "matmul"))
    __truediv__, __pow__, __neg__, __invert__ = map(_operator, ("div", "pow", "neg", "not"))
    __rmul__, __rpow__, __rsub__ = (_operator(name, reflected=True) for name in ("mul", "pow", "sub"))
    __and__, __or__ = map(_operator, ("and", "or"))
    __le__, __lt__, __ge__, __gt__ = map(_operator, ("le", "lt", "ge", "gt"))


class Expression(Operand):
    """An operation on some inputs: operands, and constants such as numbers, types and places."""

    def __init__(self, name: str, inputs: tuple[Any, ...], options: dict[str, Any], axes: tuple[str, ...] | None):
        self.name, self.inputs, self.options = name, inputs, options
        values = [_values(x) for x in inputs]
        self.value: Tensor = OPERATIONS[name].compute(*values, **options)
        self.axes = OPERATIONS[name].axes(self) if axes is None else axes

    @property
    def operands(self) -> list[Operand]:
        """The inputs that are not constants."""
        return [x for x in _flat(self.inputs) if isinstance(x, Operand)]


def call(name: str, *inputs: Any, axes: tuple[str, ...] | None = None, **options: Any) -> Expression:
    """An operation by its name. `axes`: the names of the result's axes, where they differ from those of the inputs."""
    return Expression(name, inputs, options, axes)


def cat(*each: Operand) -> Expression:
    """Operands joined along their last axis."""
    return call("cat", list(each), -1)


def side_by_side(*each: Operand) -> Expression:
    """The first number of each operand's vectors, then the second of each, and so on."""
    return call("stack", list(each), -1).flatten(-2)


def short(x: float) -> float:
    """A constant as an integer where it is one: the same number, written shorter."""
    return int(x) if isinstance(x, float) and x.is_integer() else x


def _values(x: Any) -> Any:
    if isinstance(x, Operand):
        return x.value
    return [_values(each) for each in x] if isinstance(x, list) else x


def _flat(inputs: Sequence[Any]) -> Iterator[Any]:
    for x in inputs:
        yield from _flat(x) if isinstance(x, list) else [x]


# ---- Formula, code, tree for a page, and gradients of an expression


def formula_of(name: str, x: Operand, axes: tuple[str, ...]) -> str:
    """`name[i, j] = …`: the expression in letters, with one letter for each of these axes."""
    view, places = View(False, heads=_mixes_heads(x), root=x), []
    for axis in axes:
        found, view = ("", view) if axis == "1" else view.fresh(axis)
        places.append(letter(found))
    lines = []
    for own in _openings(x, places, axes):
        right = written(x, own[len(own) - x.ndim :] if x.ndim else (), view)
        lines.append(f"{view.named(name, axes, own).text} = {right.text}")
    return ", ".join(lines)


def _openings(x: Operand, places: list[Linear], axes: tuple[str, ...]) -> list[list[Any]]:
    """The places on the left side. Where an axis joins several axes or vectors, its place shows the parts."""
    flat = x
    while isinstance(flat, Expression) and (flat.name in ("to", "pad") or _begins(flat)):
        flat = flat.inputs[0]
    if not isinstance(flat, Expression) or flat.name != "flatten":
        return [list(places)]
    inner = flat.inputs[0]
    if inner.name == "stack":
        pair = letter("n")
        return [[*places[:-1], moved(pair, len(inner.inputs[0]), k)] for k in range(len(inner.inputs[0]))]
    if flat is not x:
        return [list(places)]
    start = flat.inputs[1] % inner.ndim
    names = [View(False).fresh(axis)[0] for axis in inner.axes[start:]]
    return [[*places[:-1], joined([letter(name) for name in names], inner.shape[start:])]]


def _begins(x: Expression) -> bool:
    """Whether the expression selects the first entries of its input."""
    return x.name == "index" and all((isinstance(p, slice) and not p.start) or p is Ellipsis for p in x.inputs[1:])


def _mixes_heads(x: Operand) -> bool:
    """Whether an axis of heads becomes a part of another axis, or is removed."""
    if not isinstance(x, Expression):
        return False
    changes = x.name in ("flatten", "unflatten", "index") and ("H" in x.axes) != ("H" in x.inputs[0].axes)
    return changes or any(map(_mixes_heads, x.operands))


def written(x: Any, places: Places, view: View) -> Text:
    """One place of x, in letters or in numbers."""
    if isinstance(x, Expression):
        return OPERATIONS[x.name].write(x, places, view)
    if isinstance(x, Operand):
        return number_at(x.value, places) if view.numbers else view.named(getattr(x, "name", "?"), x.axes, places)
    text = numeral(x).text
    return Text(UNARY if text.startswith("-") else ATOM, text)


def code_of(x: Any) -> Text:
    """The code of x in PyTorch."""
    if isinstance(x, Expression):
        return OPERATIONS[x.name].code(x)
    if isinstance(x, Operand):
        return Text(ATOM, getattr(x, "name", "?"))
    text = ", ".join(code_of(each).text for each in x) if isinstance(x, list | tuple) else repr(x)
    if isinstance(x, list):
        return Text(ATOM, f"[{text}]")
    return Text(ATOM, f"({text})") if isinstance(x, tuple) else Text(UNARY if text.startswith("-") else ATOM, text)


def tree_of(x: Any, place: bool = False) -> dict[str, Any]:
    """The tree of x for a page, as JSON: see `front/language.js`. `place`: whether x is a part of an index."""
    if isinstance(x, Expression):
        inputs = [tree_of(each, x.name == "index") for each in x.inputs]
        given = {name: each for name, each in x.options.items() if not isinstance(each, torch.device)}
        options = {name: tree_of(each) for name, each in given.items()}
        return {"kind": "call", "name": x.name, "inputs": inputs, "options": options}
    if isinstance(x, Operand):
        return {"kind": "name", "name": getattr(x, "name", "?")}
    if isinstance(x, list | tuple) and not place:
        return {"kind": "call", "name": "list", "inputs": [tree_of(each) for each in x], "options": {}}
    if isinstance(x, slice):
        ends = {"from": x.start, "to": x.stop, "by": x.step}
        return {"kind": "value", "value": {name: end for name, end in ends.items() if end is not None}, "text": None}
    if isinstance(x, torch.dtype):
        x = str(x).removeprefix("torch.")
    value = "..." if x is Ellipsis else str(x) if isinstance(x, float) and abs(x) == torch.inf else x
    return {"kind": "value", "value": value, "text": str(x) if isinstance(x, int) else None}


class Unsaid(Exception):
    """Raised for a gradient that has no formula here."""


def flows(x: Operand, out: Operand, d: Operand, name: str) -> list[Operand]:
    """The terms that the gradient d of x sends to the operand of this name: one for each place where x reads it. `out`:
    x itself, as a step if it has a name. Raises `Unsaid` where an operation on the way has no rule."""
    if not isinstance(x, Expression):
        return [d] if getattr(x, "name", "") == name else []
    if not any(reads(each, name) for each in x.operands):
        return []
    back = OPERATIONS[x.name].back
    if back is None:
        raise Unsaid
    found = []
    for each, grad in zip(x.inputs, back(x, d, out), strict=False):
        if isinstance(each, Operand) and each.value.is_floating_point() and reads(each, name):
            found += flows(each, each, _summed(grad, each), name)
    return found


def reads(x: Operand, name: str) -> bool:
    """Whether the step of this name is in a tree."""
    if isinstance(x, Expression):
        return any(reads(each, name) for each in x.operands)
    return getattr(x, "name", "") == name


def _summed(d: Operand | None, like: Operand) -> Operand:
    """d summed over the axes along which `like` was repeated."""
    if d is None:
        raise Unsaid
    for axis in range(d.ndim - 1, -1, -1):
        mine = axis - (d.ndim - like.ndim)
        repeated = d.shape[axis] > 1 and (mine < 0 or like.shape[mine] == 1)
        if repeated and d.axes[axis] in ("B", "H"):
            raise Unsaid
        if repeated:
            d = d.sum(axis, keepdim=mine >= 0)
        elif mine < 0:
            d = d.squeeze(axis)
    return d


# ---- The table of operations


class Operation(NamedTuple):
    """One operation.

    `compute`: gives its numbers. `code`: gives its line in PyTorch. `write`: writes one place of it, from places of its
    inputs. `axes`: gives the names of its axes. `back`: gives the gradients of its inputs, from its own gradient and
    itself; None where they have no formula here.
    """

    compute: Callable[..., Tensor]
    code: Callable[[Expression], Text]
    write: Callable[[Expression, Places, View], Text]
    axes: Callable[[Expression], tuple[str, ...]]
    back: Callable[[Expression, Operand, Operand], Sequence[Operand | None]] | None = None


OPERATIONS: dict[str, Operation] = {}  # by name: operations.py fills it
