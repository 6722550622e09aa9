"""Formulas: the text of an expression, with letters for the places along its axes, or with the numbers of one place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

DIGITS: ContextVar[int] = ContextVar("digits", default=4)  # of each number that is written: see `number`
TERMS = 6  # the most terms of a sum that are written out
LETTERS = {"B": "b", "H": "h", "Lq": "i", "Lk": "j", "L": "p", "Ek": "e", "Ev": "e", "in": "d", "E": "d", "Eq": "d"}

# How tightly a text binds. A text that binds less than its place needs is put in brackets.
CONDITION, COMPARE, SUM, SERIES, PRODUCT, UNARY, POWER, ATOM = range(8)


class Text(NamedTuple):
    """A part of a formula, or of a line of code."""

    binds: int
    text: str

    def inside(self, least: int) -> str:
        """The text, in brackets where it binds less than `least`."""
        return self.text if self.binds >= least else f"({self.text})"


class Linear(NamedTuple):
    """A place as a formula names it, `h·4 + d`: letters with their factors, and a number."""

    terms: tuple[tuple[str, Fraction], ...]
    plus: Fraction = Fraction(0)

    def __str__(self) -> str:
        over = max(each.denominator for each in (self.plus, *(factor for _, factor in self.terms)))
        single, plus = len(self.terms) == 1, self.plus * over
        words = []
        for letter, factor in ((letter, factor * over) for letter, factor in self.terms):
            words.append(letter if factor == 1 else f"{factor}{letter}" if single else f"{letter}·{factor}")
        text = " + ".join(words) + (f" {'+' if plus > 0 else '-'} {abs(plus)}" if plus else "")
        return text if over == 1 else f"({text}) / {over}" if plus else f"{text} / {over}"


Place = int | Linear
Places = Sequence[Place]


def letter(name: str) -> Linear:
    return Linear(((name, Fraction(1)),))


def moved(place: Place, times: int, plus: int = 0) -> Place:
    """The place times · place + plus."""
    if isinstance(place, int):
        return place * times + plus
    return Linear(tuple((name, factor * times) for name, factor in place.terms), place.plus * times + plus)


def joined(places: Places, sizes: Sequence[int]) -> Place:
    """The place in one axis that joins axes of these sizes, for a number at these places of them."""
    found: Place = places[0]
    for place, size in zip(places[1:], sizes[1:], strict=True):
        found = moved(found, size)
        if isinstance(found, int) and isinstance(place, int):
            found += place
        else:
            one, two = (p if isinstance(p, Linear) else Linear((), Fraction(p)) for p in (found, place))
            found = Linear(one.terms + two.terms, one.plus + two.plus)
    return found


def apart(place: Place, sizes: Sequence[int]) -> list[Place]:
    """The places in axes of these sizes, for a number at one place of the axis that joins them."""
    found: list[Place] = []
    for size in reversed(sizes[1:]):
        outer, inner = _divided(place, size)
        found.append(inner)
        place = outer
    return [place, *found[::-1]]


def _divided(place: Place, size: int) -> tuple[Place, Place]:
    if isinstance(place, int):
        return divmod(place, size)
    outer = tuple((name, factor / size) for name, factor in place.terms if factor % size == 0)
    inner = tuple((name, factor) for name, factor in place.terms if factor % size)
    if not inner:
        return Linear(outer, Fraction(place.plus // size)), int(place.plus % size)
    if outer and len(inner) == 1 and inner[0][1] == 1 and not place.plus:
        return Linear(outer), Linear(inner)
    return letter(f"({place} // {size})"), letter(f"({place} mod {size})")


class View(NamedTuple):
    """How leaves and sums are written: in letters, or, at one place, in numbers.

    `used`: the letters that have a meaning already. `heads`: whether heads have a letter too. `root`: the whole
    expression.
    """

    numbers: bool
    used: frozenset[str] = frozenset()
    heads: bool = False
    root: object = None

    @property
    def times(self) -> str:
        return "·" if self.numbers else " · "

    def named(self, name: str, axes: Sequence[str], places: Places) -> Text:
        shown = [
            str(place)
            for axis, place in zip(axes, places, strict=True)
            if axis not in ("1", "B") and (self.heads or axis != "H")
        ]
        return Text(ATOM, f"{name}[{', '.join(shown)}]" if shown else name)

    def fresh(self, axis: str) -> tuple[str, View]:
        """A letter that has no meaning yet, and the view in which it names a place of this axis."""
        name = next(each for each in (LETTERS.get(axis, "n"), *"klmnopqrstuvw") if each not in self.used)
        return name, self._replace(used=self.used | {name})

    def series(
        self, sign: str, axis: str, size: int, term: Callable[[Place, View], Text], rank: Callable[[], Tensor]
    ) -> Text:
        """Σ or another sign over an axis, with a letter or with its terms. Of many keys, those of largest `rank`."""
        if not self.numbers:
            name, inner = self.fresh(axis)
            if sign in ("every", "some"):
                return Text(COMPARE, f"{sign} {term(letter(name), inner).text}")
            return Text(SERIES, f"{sign}_{name} {term(letter(name), inner).inside(PRODUCT)}")
        places = list(range(size))
        if axis == "Lk" and size:
            weight = rank().detach().double()
            if sign == "Σ":
                weight = weight.abs()
                places = [n for n in places if float(weight[n]) != 0] or places[:1]
            weight = weight.nan_to_num(torch.inf, posinf=torch.inf)
            if len(places) > TERMS - 1:
                best = weight.topk(TERMS - 2).indices.tolist()
                left = len(places) - len(best)
                return total([term(n, self) for n in sorted(best)], left, sign)
        return total([term(n, self) for n in places[:TERMS]], max(0, len(places) - TERMS), sign)


def _numbers(places: Iterable[Place]) -> tuple[int, ...]:
    return tuple(place for place in places if isinstance(place, int))


def number_at(value: Tensor, places: Places) -> Text:
    """The number of a step at a place."""
    return numeral(value.detach()[_numbers(0 if n == 1 else p for p, n in zip(places, value.shape, strict=True))])


def row_at(value: Tensor, places: Places, axis: int) -> Tensor:
    """The row along an axis in which a place stands."""
    axis %= value.ndim
    row: Tensor = value[_numbers(places[:axis])].movedim(0, -1)[_numbers(places[axis + 1 :])]
    return row


def total(terms: Sequence[Text], left: int = 0, sign: str = "Σ") -> Text:
    """A sum, or the result of another sign, written out. Terms that are left out are counted. Without terms it is 0."""
    if sign != "Σ":
        return Text(ATOM, f"{sign}({', '.join([term.text for term in terms] + ['…'] * bool(left))})")
    if len(terms) <= 1 and not left:
        return terms[0] if terms else Text(ATOM, "0")
    more = [f"… ({left:,} more terms)"] * bool(left)
    return Text(SUM, " + ".join([terms[0].inside(SUM), *(term.inside(PRODUCT) for term in terms[1:]), *more]))


def numeral(x: Tensor | float | str) -> Text:
    """A number, or the name of a type. A negative number binds as a sum does."""
    if isinstance(x, Tensor):
        x = x.item()
    text = number(x) if isinstance(x, float) else str(x)
    return Text(SUM if text.startswith("-") else ATOM, text)


@contextmanager
def with_digits(count: int) -> Iterator[None]:
    """Numbers that are written meanwhile have so many digits."""
    before = DIGITS.set(count)
    try:
        yield
    finally:
        DIGITS.reset(before)


@cache
def _limits(count: int) -> tuple[float, ...]:
    """The least sizes that are rounded up to 0.1, 0.01 and 0.001 with so many digits: 0.099995, … with four."""
    return tuple(float(f"0.{'0' * zeros}{'9' * count}5") for zeros in (1, 2, 3))


def number(x: float | Tensor) -> str:
    """A number, or a tensor of one, as every table and sum shows it: four digits after the point, but whole numbers.

    Below 0.1, and far from 1, it has four significant digits, so that a reader can follow a sum. A number that is
    rounded up to 0.1 is shown as 0.1 is. `with_digits` makes them another number of digits than four.

    >>> from clearhead.base.symbolic.formulas import number
    >>> number(0.5), number(-1234567.0), number(2e-7), number(float("-inf")), number(3.0), number(-0.00123456)
    ('0.5000', '-1.235e+06', '2.000e-07', '-∞', '3', '-0.001235')
    >>> number(0.1), number(0.09999999), number(0.09999), number(0.00999999), number(0.000999999)
    ('0.1000', '0.1000', '0.09999', '0.01000', '0.001000')
    """
    x = float(x.detach()) if isinstance(x, Tensor) else x
    if x != x:
        return "NaN"
    if abs(x) == float("inf"):
        return "∞" if x > 0 else "-∞"
    x += 0.0  # -0.0 is shown as 0
    size = abs(x)
    if x == round(x) and size < 1e4:
        return f"{x:.0f}"
    count = DIGITS.get()
    tenth, hundredth, thousandth = _limits(count)
    places = count if size >= tenth else count + 1 if size >= hundredth else count + 2
    return f"{x:.{places}f}" if thousandth <= size < 1e4 else f"{x:.{count - 1}e}"


def infix(sign: str, binds: int, left: int, right: int) -> Callable[[Text, Text], Text]:
    """A function that writes two texts with a sign between them, each in brackets where it binds too little."""
    return lambda a, b: Text(binds, f"{a.inside(left)}{sign}{b.inside(right)}")


def function(name: str) -> Callable[..., Text]:
    return lambda *inner: Text(ATOM, f"{name}({', '.join(each.text for each in inner)})")
