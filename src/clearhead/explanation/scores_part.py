"""The parts of an explanation that lead from query and key to the finished scores: score, scale, bias, mask."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.base.expressions import short
from clearhead.base.shapes import Sizes
from clearhead.base.steps import PAIRS, Step, made, number
from clearhead.biases.base import ends_in, numbers_alone
from clearhead.explanation.shown import Shown
from clearhead.masks.base import Mask
from clearhead.masks.dense import DenseMask
from clearhead.problem.problem import Problem
from clearhead.scores.base import SCORES, ByTile, with_parameters
from clearhead.scores.dot import Dot


def scores_part(rows: Problem, query: Step, key: Step, bias: list[Step]) -> list[Step]:
    """The score's own steps, then scale, softcap and the steps of the bias; the last step is called "scores"."""
    scores = rows.scores
    assert isinstance(scores, ByTile)
    steps = with_parameters(scores.score, lambda p: p.to(query.value.dtype)).explained(query, key)

    def before(name: str) -> Step:
        """The last step under this name, since it is not the finished scores yet."""
        steps[-1] = steps[-1].called(name)
        return steps[-1]

    if scores.scale != 1.0:
        products = before("products" if isinstance(scores.score, Dot) else "unscaled")
        why = _why_scaled(products.value, scores.scale, query.value.shape[-1], scores.score)
        steps.append(made("scores", why, products * scores.scale))
    if scores.softcap is not None:
        cap = short(scores.softcap)
        why = f"The softcap bounds every score between -{cap:g} and {cap:g}, smoothly."
        steps.append(made("scores", why, cap * (before("uncapped") / cap).tanh()))
    if bias:
        why = "The bias is added to the score: where it is below 0 the key gets less weight, where it is above 0 more."
        steps += [*bias, made("scores", why, before("unbiased") + bias[-1])]
    if rows.poison is not None:
        of_query, of_key = rows.poison
        poison = of_query + of_key.repeat_interleave(rows.sizes.heads // of_key.shape[1], 1)
        why = "Inputs hold NaN or ∞, which stand above as 0. NaN is put here for each pair of such a query or key."
        given = Step("not_finite", why, poison.to(query.value.dtype), SCORES)
        why = "So NaN reaches the queries that may see such an input, and no others."
        steps += [given, made("scores", why, before("of_finite") + given)]
    return steps


def _why_scaled(before: Tensor, scale: float, width: int, score: object) -> str:
    if isinstance(score, Dot) and width and math.isclose(scale, width**-0.5, rel_tol=1e-6):
        why = (
            f"{number(scale)} is 1/√{width}. Sums of {width} products lie about √{width} times as far apart as single "
            "products, and the scale undoes that: scores far apart would give one key nearly all the weight, and "
            "gradients near 0."
        )
    else:
        why = "The larger the scale, the more of the weight goes to the keys with the largest scores."
    finite = before[before.isfinite()].detach()
    if finite.numel() <= 1:
        return why
    variance = float(finite.var(correction=0))
    return (
        f"{why} The variance of the scores is {number(variance)} before and {number(variance * scale * scale)} after."
    )


def bias_part(problem: Problem, rows: Problem, shown: Shown, dtype: torch.dtype) -> list[Step]:
    """The bias's own steps, where they are known, else its numbers; the last step is called "bias".

    Empty where the problem has no bias. `rows`: the chosen rows of the problem. `dtype`: the dtype of the scores.
    """
    if problem.bias is None or rows.bias is None:
        return []
    given, every = problem.bias.given, slice(None)
    numbers = rows.bias.tile(every, every, every, every, rows.sizes).to(dtype)
    if given is not None:
        sides = (*shown.region.sides[:3], every)
        steps = given.explained(problem.sizes, sides)
        # the bias of a recorded call may read a tensor that has been written to since
        if ends_in(steps, numbers.expand(rows.sizes.shape)):
            if torch.promote_types(steps[-1].value.dtype, dtype) == dtype:
                return steps
            steps = given.explained(problem.sizes, sides, "bias_wide")
            return [*steps, made("bias", f"Rounded to {dtype}, which the scores have.", steps[-1].to(dtype), PAIRS)]
    return numbers_alone("bias", numbers)


def mask_part(mask: Any, sizes: Sizes, shown: Shown, scores: Step) -> list[Step]:
    """The mask's own steps, and the scores with −∞ where it is False: the last step, "masked"."""
    if isinstance(mask, Tensor | np.ndarray):
        mask = DenseMask(mask)
    assert isinstance(mask, Mask)
    steps = mask.explained(sizes, (*shown.region.sides[:3], slice(None)))
    first = next(n for n, step in enumerate(steps) if step.value.dtype == torch.bool)
    steps[first] = replace(steps[first], why=f"{steps[first].why} ■ is True: the query may see the key; · is False.")
    keep = steps[-1].value.expand(scores.value.shape)
    why = (
        f"Where the mask is False the score becomes -∞: here for {int((~keep).sum()):,} of {keep.numel():,} pairs. "
        "exp(-∞) is 0, so these keys get the weight 0, and the weights of the other keys sum to 1."
    )
    return [*steps, made("masked", why, scores.masked_fill(~steps[-1], -torch.inf))]
