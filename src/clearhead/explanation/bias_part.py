"""The part of an explanation that says what is added to the scores."""

from __future__ import annotations

import torch

from clearhead.base.steps import PAIRS, Step, number
from clearhead.biases.base import ends_in, numbers_alone
from clearhead.explanation.shown import Shown
from clearhead.problem.problem import Problem


def bias_part(problem: Problem, rows: Problem, shown: Shown, dtype: torch.dtype) -> list[Step]:
    """The bias's own steps, where they are known, else its numbers; the last step is called "bias". Empty without one.

    `rows`: the chosen rows of the problem. `dtype`: that of the scores.
    """
    if problem.bias is None or rows.bias is None:
        return []
    given, every = problem.bias.given, slice(None)
    numbers = rows.bias.tile(every, every, every, every, rows.sizes).to(dtype)
    if given is not None:
        sides = (*shown.region.sides[:3], every)
        steps = given.explained(problem.sizes, sides)
        # that of a recorded call may read a tensor that was written to since
        if ends_in(steps, numbers.expand(rows.sizes.shape)):
            wider = torch.promote_types(steps[-1].value.dtype, dtype) != dtype
            return _rounded(given.explained(problem.sizes, sides, "bias_wide"), dtype) if wider else steps
    return numbers_alone("bias", numbers)


def _rounded(steps: list[Step], dtype: torch.dtype) -> list[Step]:
    """The steps of a bias that is wider than the scores, and its numbers in the scores' dtype."""
    wide = steps[-1]
    why, code = f"Rounded to {dtype}, which the scores have.", f"bias = {wide.name}.to({dtype})"
    made = Step(
        "bias", f"bias[i, j] = {wide.name}[i, j]", why, wide.value.to(dtype), PAIRS, code,
        lambda at: number(wide.value[at]),
    )  # fmt: skip
    return [*steps, made]
