"""One step of a computation, as it is explained: its formula, its numbers, and why it is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

TERMS = 6  # the most terms of a sum that are written out
Cell = Callable[[tuple[int, ...]], str]
PAIRS = ("B", "H", "Lq", "Lk")  # the axes of what there is one of for each pair
INDEX = {"Lq": "i", "Lk": "j", "L": "p"}  # the letter of a place along an axis, in formulas


class Back(NamedTuple):
    """The gradient of a step, said by the step that is made of it: with `{d}` for that one's own gradient."""

    formula: str
    why: str = "By the chain rule: the gradient of the step that is made of this one, times how that depends on it."


@dataclass(frozen=True, eq=False)
class Step:
    """One result of a computation, with what it was made of.

    >>> import torch
    >>> from clearhead.base.steps import Step
    >>> x = torch.tensor([[1.0, 2.0]], dtype=torch.float32, device="cpu")
    >>> Step("doubled", "doubled = 2 x", "An example.", 2 * x, ("L", "E"), "doubled = 2 * x").value
    tensor([[2., 4.]])

    `name`: what the result is called, in later formulas and in the script. `formula`: in those names. `why`: in a
    sentence. `axes`: the name of each dimension of `value`, by the legend of shapes (`base/shapes.py`); where the first
    two are "B" and "H" they are those of the call.
    `code`: PyTorch that computes it from the steps before it, over any number of leading dimensions; where it is empty,
    the script writes the value out. `cell(index)`: the right-hand side of one number of it, written out; in a finished
    `Explanation` that of the one number that is shown, whatever the index.
    `aside`: whether it is what would happen otherwise, which no later step uses. `copies`: of an input, how many
    sequences, and how many heads in a row, have the same rows since they share them.
    `within`: of whole numbers that are given, the least and the largest that a reader may put in their place.
    `back`: by the name of a step that it is made of, that one's gradient; where no other step is made of that one too.
    """

    name: str
    formula: str
    why: str
    value: Tensor
    axes: tuple[str, ...]
    code: str = ""
    cell: Cell | None = None
    aside: bool = False
    copies: tuple[int, int] = (1, 1)
    within: tuple[int, int] | None = None
    back: Mapping[str, Back] = field(default_factory=dict)

    @property
    def given(self) -> bool:
        """Whether it is an input, and not computed."""
        return not self.code and not self.formula


def number(x: float | Tensor) -> str:
    """A number, or a tensor of one, as every table and sum shows it: four digits after the point.

    Below 0.1, and far from 1, it has four digits in all, so that a sum can be followed.

    >>> from clearhead.base.steps import number
    >>> number(0.5), number(-1234567.0), number(2e-7), number(float("-inf")), number(3.0), number(-0.00123456)
    ('0.5000', '-1.235e+06', '2.000e-07', '-∞', '3.0000', '-0.001235')
    """
    x = float(x.detach()) if isinstance(x, Tensor) else x
    if x != x:
        return "NaN"
    if abs(x) == float("inf"):
        return "∞" if x > 0 else "-∞"
    x += 0.0  # -0.0 is shown as 0
    digits = 4 if x == 0 or abs(x) >= 0.1 else 5 if abs(x) >= 0.01 else 6
    return f"{x:.{digits}f}" if x == 0 or 1e-3 <= abs(x) < 1e4 else f"{x:.3e}"


def signed(x: float | Tensor) -> str:
    """A number inside a product or a difference: in brackets where it is negative."""
    return f"({number(x)})" if x < 0 else number(x)


def total(terms: Sequence[str], most: int = TERMS) -> str:
    """A sum written out, its last terms counted where there are many; without any it is 0."""
    if not terms:
        return "0"
    shown = " + ".join(terms[:most])
    return shown if len(terms) <= most else f"{shown} + … ({len(terms) - most} more terms)"


def products(left: Tensor, right: Tensor) -> str:
    """Σ_d left_d right_d, written out."""
    terms = [f"{signed(left[d])}·{signed(right[d])}" for d in range(min(len(left), TERMS))]
    return total(terms + [""] * (len(left) - len(terms)))


def of_pairs(query: Tensor, key: Tensor) -> Cell:
    """The cells of query · keyᵀ: a query's row times a key's."""
    return lambda at: products(query[at[:3]], key[(*at[:2], at[3])])


def back_of_pairs(query: str, key: str, d: str = "d") -> dict[str, Back]:
    """What Σ_d query[i, d] · key[j, d] sends back to its two sides, which have these names."""
    return {
        query: Back(f"d_{query}[i, {d}] = Σ_j {{d}}[i, j] · {key}[j, {d}]"),
        key: Back(f"d_{key}[j, {d}] = Σ_i {{d}}[i, j] · {query}[i, {d}]"),
    }


def of_projection(side: Tensor, matrix: Tensor) -> Cell:
    """The cells of side · matrixᵀ: a vector times a row of the matrix, as nn.Linear has it."""
    return lambda at: products(side[at[:-1]], matrix[at[-1]])
