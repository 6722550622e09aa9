"""The part of an explanation that says what is added to the scores."""

from __future__ import annotations

import torch

from clearhead.base.steps import PAIRS, Step, number
from clearhead.biases.base import numbers_alone
from clearhead.explanation.shown import Shown
from clearhead.problem.problem import Problem


def bias_part(problem: Problem, rows: Problem, shown: Shown, dtype: torch.dtype) -> list[Step]:
    """The bias's own steps, where they are known, else its numbers; the last step is called "bias". Empty without one.

    `rows`: the chosen rows of the problem. `dtype`: that of the scores.
    """
    if problem.bias is None or rows.bias is None:
        return []
    given, every = problem.bias.given, slice(None)
    if given is None:
        return numbers_alone("bias", rows.bias.tile(every, every, every, every, rows.sizes).to(dtype))
    steps = given.explained(problem.sizes, (*shown.region.sides[:3], every))
    if torch.promote_types(steps[-1].value.dtype, dtype) == dtype:
        return steps
    *steps, wide = given.explained(problem.sizes, (*shown.region.sides[:3], every), "bias_wide")
    why = f"Rounded to {dtype}, which the scores have."
    return [
        *steps,
        wide,
        Step(
            "bias", "bias[i, j] = bias_wide[i, j]", why, wide.value.to(dtype), PAIRS, f"bias = bias_wide.to({dtype})",
            lambda at: number(wide.value[at]),
        ),
    ]  # fmt: skip
