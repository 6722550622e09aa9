"""One step of a computation as an explanation shows it: its formula, its numbers, and the reason for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clearhead.base.symbolic import operations as operations
from clearhead.base.symbolic.expressions import Operand as Operand
from clearhead.base.symbolic.expressions import code_of, computed, formula_of, outline, tree_of, written
from clearhead.base.symbolic.formulas import View
from clearhead.base.symbolic.formulas import number as number

Cell = Callable[[tuple[int, ...]], str]
PAIRS = ("B", "H", "Lq", "Lk")  # the axes of a value with one number for each pair


class _Text:
    """A field of a step that is given, or else written, when it is first read, from the step's expression."""

    def __init__(self, write: Callable[[Step, Operand], Any], without: Any) -> None:
        self.write, self.without = write, without

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, step: Step | None, owner: type) -> Any:
        if step is None:
            return None  # the default of the field: nothing is given
        found = step.__dict__[self.name]
        if found is None:
            found = self.without if step.made is None else self.write(step, step.made)
            step.__dict__[self.name] = found
        return found

    def __set__(self, step: Step, text: Any) -> None:
        step.__dict__[self.name] = text


def _text(write: Callable[[Step, Operand], Any], without: Any = "") -> Any:
    return _Text(write, without)


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
    the same for a page. `cell(index)`: the right-hand side of one number, written out, where `made` is missing; in a
    finished `Explanation` it is that of the one number that is shown, whatever the index.
    `aside`: whether the step shows another outcome, which no later step uses. `copies`: of an input, how many
    sequences, and how many heads in a row, share the same rows.
    `within`: of whole numbers that are given, the least and the largest number that a reader may enter.
    `made`: the expression that formula, code and tree are read from, each when it is first asked for; in a finished
    `Explanation` it is an outline, without numbers. `by`: the expression that its gradients go through, until the
    explanation is finished; None where they have no formula.
    """

    name: str
    why: str
    value: Tensor
    axes: tuple[str, ...]
    formula: str = _text(lambda step, made: formula_of(step.name, made, step.axes))
    code: str = _text(lambda step, made: f"{step.name} = {code_of(made).text}")
    tree: Mapping[str, Any] | None = _text(lambda step, made: tree_of(made), None)
    cell: Cell | None = None
    aside: bool = False
    copies: tuple[int, int] = (1, 1)
    within: tuple[int, int] | None = None
    made: Operand | None = field(default=None, repr=False)
    by: Operand | None = field(default=None, repr=False)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.value.shape

    @property
    def given(self) -> bool:
        """Whether the step is an input, and not computed."""
        return self.made is None and not self.code and not self.formula

    def but(self, **fields: Any) -> Step:
        """The same step with other fields. A text that is not written yet stays so; `dataclasses.replace` writes it."""
        found = object.__new__(type(self))
        found.__dict__.update(self.__dict__)
        found.__dict__.update(fields)
        return found

    def called(self, name: str) -> Step:
        """The same step with another name."""
        if self.made is not None:
            return self.but(name=name, formula=None, code=None)
        formula, code = (name + text.removeprefix(self.name) if text else "" for text in (self.formula, self.code))
        return self.but(name=name, formula=formula, code=code)

    def writes(self, steps: Mapping[str, Step] | None = None) -> Cell | None:
        """`cell`, or that of the expression. `steps`: those of a finished explanation, by name, if it is finished."""
        made = self.made
        if self.cell is not None or made is None:
            return self.cell
        return lambda at: written(made if steps is None else computed(made, steps), at, View(True)).text

    def listed(self, **fields: Any) -> Step:
        """The same step with its numbers listed: the steps that its expression reads are not shown."""
        return self.but(**{"formula": "", "code": "", "tree": None, "cell": self.writes(), **fields}, made=None)

    def settled(self, cell: Cell | None) -> Step:
        """The same step in a finished explanation: it shares no memory with the inputs, and holds no graph."""
        value = self.value.detach()
        value = value if self.made is not None or self.code else value.clone()
        return self.but(value=value, cell=cell, made=outline(self.made), by=None)


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
    return Step(name, why, value, axes, aside=aside, made=expression, by=by)
