"""The operations of expressions: one entry each.

Names and inputs are those of PyTorch. A page knows the same operations (`front/operations.js`, `front/shapes.js`).
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from clearhead.base.symbolic.expressions import OPERATIONS, Expression, Operand, Operation, code_of, short, written
from clearhead.base.symbolic.formulas import (
    ATOM,
    COMPARE,
    CONDITION,
    POWER,
    PRODUCT,
    SERIES,
    SUM,
    UNARY,
    Places,
    Text,
    View,
    function,
    infix,
    letter,
    row_at,
)
from clearhead.base.symbolic.rearrangements import axis_of, fit, method, torch_function


def _repeated_axes(x: Expression) -> tuple[str, ...]:
    """The name of each axis, taken from an input that is not repeated along it."""
    first, *others = x.operands
    if all(each.axes == first.axes for each in others):
        return first.axes
    found = []
    for n in range(-x.ndim, 0):
        every = [(each.shape[n], each.axes[n]) for each in x.operands if each.ndim >= -n]
        found.append(max(every, key=lambda one: (one[0], one[1] != "1"))[1])
    return tuple(found)


def _entry(compute: Any, text: Any, sign: Any, back: Any = None) -> Operation:
    """An operation entry by entry. `text`: its code, from its inputs' code. `sign`: its text, from its inputs' text."""
    return Operation(
        compute,
        lambda x: text(*map(code_of, x.inputs)),
        lambda x, places, view: sign(view)(*(written(each, fit(places, each, view), view) for each in x.inputs)),
        _repeated_axes,
        back,
    )


def _infix(compute: Any, sign: str, binds: int, right: int, back: Any) -> Operation:
    text = infix(sign, binds, binds, right)
    return _entry(compute, text, lambda view: text, back)


def _compared(compute: Any, sign: str) -> Operation:
    text = infix(sign, COMPARE, SUM, SUM)
    return _entry(compute, text, lambda view: text)


def _logical(compute: Any, sign: str, word: str) -> Operation:
    return _entry(compute, infix(sign, COMPARE, SUM, SUM), lambda view: infix(word, CONDITION, COMPARE, COMPARE))


def _unary(compute: Any, name: str, back: Any, shown: Any = None) -> Operation:
    return _entry(compute, function(f"torch.{name}"), lambda view: shown or function(name), back)


def _series(x: Expression, axis: int, sign: str, places: Places, view: View, of: Any = lambda term: term) -> Text:
    """A sign over one axis of the first input. `of`: the text of a term, from the text of a number of the input."""
    inner, keeps = x.inputs[0], x.ndim == x.inputs[0].ndim
    before, after = list(places[:axis]), list(places[axis + keeps :])
    sides = [0 if n == 1 and view.numbers else p for p, n in zip([*before, 0, *after], inner.shape, strict=True)]
    return view.series(
        sign,
        inner.axes[axis],
        inner.shape[axis],
        lambda place, view: of(written(inner, [*sides[:axis], place, *sides[axis + 1 :]], view)),
        lambda: row_at(inner.value, sides, axis),
    )


def _reduced(compute: Any, sign: str, back: Any = None) -> Operation:
    """An operation over one axis. `sign`: its sign in a formula."""

    def write(x: Expression, places: Places, view: View) -> Text:
        return _series(x, axis_of(x), sign, places, view)

    def axes(x: Expression) -> tuple[str, ...]:
        inner, axis = x.inputs[0].axes, axis_of(x)
        return (*inner[:axis], *(("1",) if x.options.get("keepdim") else ()), *inner[axis + 1 :])

    return Operation(compute, lambda x: method(x.name)(x), write, axes, back)


def _matmul_write(x: Expression, places: Places, view: View) -> Text:
    left, right = x.inputs
    vector = right.ndim == 1
    row, column = (places, []) if vector else (places[:-1], [places[-1]])

    def of(side: Operand, inner: list[Any]) -> Places:
        return fit([*row[: len(row) - 1], *inner], side, view) if side is right else fit([*row, *inner], side, view)

    def term(place: Any, view: View) -> Text:
        one = written(left, of(left, [place]), view)
        other = written(right, of(right, [place, *column]), view)
        return infix(view.times, PRODUCT, PRODUCT, PRODUCT)(one, other)

    size = left.shape[-1]
    return view.series("Σ", left.axes[-1], size, term, lambda: row_at(left.value, of(left, [0]), -1))


def _matmul_back(x: Expression, d: Operand, out: Operand) -> list[Operand]:
    left, right = x.inputs
    if right.ndim == 1:
        return [d.unsqueeze(-1) * right, d.unsqueeze(-1) * left]
    return [d @ right.mT, (d.mT @ left).mT]


def _matmul_axes(x: Expression) -> tuple[str, ...]:
    left, right = x.inputs
    return left.axes[:-1] if right.ndim == 1 else (*left.axes[:-1], right.axes[-1])


def _fill_write(x: Expression, places: Places, view: View) -> Text:
    a, where, fill = x.inputs
    if view.numbers:
        at = tuple(fit(places, where, view))
        return written(fill if bool(where.value[at]) else a, fit(places, a, view), view)
    of, other = written(a, fit(places, a, view), view), written(short(fill), (), view)
    if isinstance(where, Expression) and where.name == "not":
        keep = where.inputs[0]
        kept = written(keep, fit(places, keep, view), view)
        return Text(CONDITION, f"{of.inside(SUM)} if {kept.text} else {other.text}")
    hidden = written(where, fit(places, where, view), view)
    if x is view.root:
        return Text(CONDITION, f"{of.inside(SUM)}, and {other.text} where {hidden.text}")
    return Text(CONDITION, f"{other.text} if {hidden.text} else {of.inside(SUM)}")


def _looked_up(x: Expression, places: Places, view: View) -> Text:
    table, at, _ = x.inputs
    lead = fit(places, at, view)
    inner = int(at.value[tuple(lead)]) if view.numbers else letter(written(at, lead, view).text)
    return view.named(getattr(table, "name", "?"), table.axes, [*fit(places[:-1], _Lead(table), view), inner])


class _Lead(Operand):
    """All axes of an operand but the last."""

    def __init__(self, whole: Operand) -> None:
        self.axes, self.value = whole.axes[:-1], whole.value[..., 0]


def _softmax_write(x: Expression, places: Places, view: View) -> Text:
    inner, axis = x.inputs[0], axis_of(x)

    def power(place: Any, view: View) -> Text:
        return function("exp")(written(inner, [*places[:axis], place, *places[axis + 1 :]], view))

    sums = view.series("Σ", inner.axes[axis], x.shape[axis], power, lambda: row_at(x.value, places, axis))
    return infix(" / ", PRODUCT, PRODUCT, SERIES if sums.binds == SERIES else UNARY)(power(places[axis], view), sums)


def _softmax_back(x: Expression, d: Operand, out: Operand) -> list[Operand]:
    return [out * (d - (out * d).sum(x.inputs[1], keepdim=True))]


def _equal(a: Text, b: Text) -> Text:
    return infix(" is " if b.text == "-∞" else " == ", COMPARE, SUM, SUM)(a, b)


_TWO = Text(ATOM, "2")


def _squared(a: Text, b: Text) -> Text:
    return Text(POWER, f"{a.inside(ATOM)}²" if b.text == "2" else f"{a.inside(ATOM)}^{b.inside(ATOM)}")


def _root(a: Text) -> Text:
    return Text(ATOM, f"√({a.text})")


OPERATIONS |= {
    # entry by entry
    "add": _infix(operator.add, " + ", SUM, SERIES, lambda x, d, out: [d, d]),
    "sub": _infix(operator.sub, " - ", SUM, SERIES, lambda x, d, out: [d, -d]),
    "mul": _entry(
        operator.mul, infix(" * ", PRODUCT, PRODUCT, UNARY), lambda view: infix(view.times, PRODUCT, PRODUCT, PRODUCT),
        lambda x, d, out: [d * x.inputs[1], d * x.inputs[0]],
    ),
    "div": _infix(operator.truediv, " / ", PRODUCT, UNARY, lambda x, d, out: [d / x.inputs[1], None]),
    "pow": _entry(operator.pow, infix("**", POWER, ATOM, UNARY), lambda view: _squared),
    "neg": _entry(
        operator.neg, lambda a: Text(UNARY, f"-{a.inside(UNARY)}"),
        lambda view: lambda a: Text(UNARY, f"-{a.inside(PRODUCT)}"),
        lambda x, d, out: [-d],
    ),
    "square": _entry(
        torch.square, lambda a: Text(ATOM, f"{a.inside(ATOM)}.square()"),
        lambda view: lambda a: _squared(a, _TWO),
        lambda x, d, out: [d * (2 * x.inputs[0])],
    ),
    "exp": _unary(torch.exp, "exp", lambda x, d, out: [d * out]),
    "tanh": _unary(torch.tanh, "tanh", lambda x, d, out: [d * (1 - out.square())]),
    "sin": _unary(torch.sin, "sin", lambda x, d, out: [d * x.inputs[0].cos()]),
    "cos": _unary(torch.cos, "cos", lambda x, d, out: [-d * x.inputs[0].sin()]),
    "sqrt": _unary(torch.sqrt, "sqrt", lambda x, d, out: [d / (2 * out)], _root),
    "abs": _unary(torch.abs, "abs", None, lambda a: Text(ATOM, f"|{a.text}|")),
    "maximum": _entry(torch.maximum, function("torch.maximum"), lambda view: function("max")),
    "le": _compared(operator.le, " <= "), "lt": _compared(operator.lt, " < "),
    "ge": _compared(operator.ge, " >= "), "gt": _compared(operator.gt, " > "),
    "eq": _entry(operator.eq, infix(" == ", COMPARE, SUM, SUM), lambda view: _equal),
    "and": _logical(operator.and_, " & ", " and "),
    "or": _logical(operator.or_, " | ", " or "),
    "not": _entry(
        operator.invert, lambda a: Text(UNARY, f"~{a.inside(UNARY)}"),
        lambda view: lambda a: Text(UNARY, f"not {a.inside(UNARY)}"),
    ),
    "masked_fill": Operation(
        torch.masked_fill, method("masked_fill"), _fill_write, _repeated_axes,
        lambda x, d, out: [d.masked_fill(x.inputs[1], 0), None],
    ),
    # over an axis
    "matmul": Operation(
        torch.matmul, lambda x: infix(" @ ", PRODUCT, PRODUCT, UNARY)(*map(code_of, x.inputs)), _matmul_write,
        _matmul_axes, _matmul_back,
    ),
    "sum": _reduced(torch.sum, "Σ", lambda x, d, out: [d if x.options.get("keepdim") else d.unsqueeze(x.inputs[1])]),
    "amax": _reduced(torch.amax, "max"),
    "all": _reduced(torch.all, "every"),
    "any": _reduced(torch.any, "some"),
    "vector_norm": Operation(
        torch.linalg.vector_norm, torch_function("torch.linalg.vector_norm"),
        lambda x, places, view: _root(_series(x, x.ndim - 1, "Σ", places, view, lambda a: _squared(a, _TWO))),
        lambda x: (*x.inputs[0].axes[:-1], "1"),
    ),
    "softmax": Operation(torch.softmax, method("softmax"), _softmax_write, _repeated_axes, _softmax_back),
    "take_along_dim": Operation(
        torch.take_along_dim, torch_function("torch.take_along_dim"), _looked_up,
        lambda x: (*_repeated_axes(x)[:-1], x.inputs[1].axes[-1]),
    ),
}  # fmt: skip
