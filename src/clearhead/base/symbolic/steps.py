"""One step of a computation as an explanation shows it: its formula, its numbers, and the reason for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from clearhead.base.symbolic import operations as operations
from clearhead.base.symbolic.expressions import Operand as Operand
from clearhead.base.symbolic.expressions import code_of, formula_of, tree_of, written
from clearhead.base.symbolic.formulas import View
from clearhead.base.symbolic.formulas import number as number

PAIRS = ("B", "H", "Lq", "Lk")  # the axes of a value with one number for each pair


@dataclass(frozen=True, eq=False)
class Step(Operand):
    """One result of a computation, and the expression that gave it. Operators on steps make expressions of later steps.

    >>> import torch
    >>> from clearhead.base.symbolic.steps import Step, made
    >>> x = Step("x", "Given.", torch.tensor([[1.0, 2.0]], dtype=torch.float32, device="cpu"), ("L", "E"))
    >>> doubled = made("doubled", "An example.", 2 * x)
    >>> doubled.value, doubled.formula, doubled.code
    (tensor([[2., 4.]]), 'doubled[p, d] = 2 · x[p, d]', 'doubled = 2 * x')

    `name`: the name of the result, in later formulas and in the script. `why`: the reason, in a sentence. `axes`: the
    name of each dimension of `value`, by the legend of shapes (`base/shapes.py`); where the first two are "B" and "H"
    they are the batch and the heads of the call.
    `formula`: the result in the names of other steps; an input has none. `code`: PyTorch code that computes it from the
    steps before it, over any number of leading dimensions; where it is empty, the script writes the value out. `tree`:
    the same for a page. `written`: in a finished `Explanation`, how the one number that is written out is computed.
    `aside`: whether the step shows another outcome, which no later step uses. `copies`: of an input, how many
    sequences, and how many heads in a row, share the same rows.
    `within`: of whole numbers that are given, the least and the largest number that a reader may enter.
    `made`: the expression that formula, code and tree are read from. `by`: the expression that its gradients go
    through; None where they have no formula. A finished explanation has neither.
    """

    name: str
    why: str
    value: Tensor
    axes: tuple[str, ...]
    formula: str = ""
    code: str = ""
    tree: Mapping[str, Any] | None = None
    written: str = ""
    aside: bool = False
    copies: tuple[int, int] = (1, 1)
    within: tuple[int, int] | None = None
    made: Operand | None = field(default=None, repr=False)
    by: Operand | None = field(default=None, repr=False)

    @property
    def given(self) -> bool:
        """Whether the step is an input, and not computed."""
        return self.made is None and not self.code and not self.formula

    def but(self, **fields: Any) -> Step:
        """The same step with other fields."""
        return replace(self, **fields)

    def called(self, name: str) -> Step:
        """The same step with another name."""
        formula, code = (name + text.removeprefix(self.name) if text else "" for text in (self.formula, self.code))
        if self.made is not None and formula:  # the name may stand in it twice
            formula = formula_of(name, self.made, self.axes)
        return self.but(name=name, formula=formula, code=code)

    def listed(self, **fields: Any) -> Step:
        """The same step with its numbers listed: the steps that its expression reads are not shown."""
        return self.but(**{"formula": "", "code": "", "tree": None, **fields})

    def settled(self, at: tuple[int, ...]) -> Step:
        """The same step in a finished explanation: it shares no memory with the inputs, and holds no graph.

        `at`: the index of the number that is written out.
        """
        value, text = self.value.detach(), self.written
        if self.made is not None and value.numel():
            text = written(self.made, at, View(True)).text
        elif not self.code:
            value = value.clone()
        return self.but(value=value, written=text, made=None, by=None)


def made(
    name: str,
    why: str,
    expression: Operand,
    axes: tuple[str, ...] | None = None,
    *,
    value: Tensor | None = None,
    by: Operand | None = None,
    aside: bool = False,
) -> Step:
    """The step that an expression of steps gives.

    `axes`: the names of its axes, where they differ from the expression's. `value`: its numbers, where they are
    computed in another way than is shown and differ in the last digits; `by`: this other way, as an expression.
    """
    axes = expression.axes if axes is None else axes
    if value is None:
        by, value = by or expression, expression.value
    texts = formula_of(name, expression, axes), f"{name} = {code_of(expression).text}", tree_of(expression)
    return Step(name, why, value, axes, *texts, aside=aside, made=expression, by=by)
