"""The part of an explanation that says who may see whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.base.shapes import Sizes
from clearhead.base.steps import Back, Step, number
from clearhead.explanation.shown import Shown
from clearhead.masks.base import Mask
from clearhead.masks.dense import DenseMask
from clearhead.scores.base import SCORES


def mask_part(mask: Any, sizes: Sizes, shown: Shown, scores: Tensor) -> list[Step]:
    """The mask's own steps, and the scores with −∞ where it is False: the last step, "masked"."""
    if isinstance(mask, Tensor | np.ndarray):
        mask = DenseMask(mask)
    assert isinstance(mask, Mask)
    steps = mask.explained(sizes, (*shown.region.sides[:3], slice(None)))
    first = next(n for n, step in enumerate(steps) if step.value.dtype == torch.bool)
    steps[first] = replace(steps[first], why=f"{steps[first].why} ■ is True: the query may see the key; · is False.")
    keep = steps[-1].value.expand(scores.shape)
    why = (
        f"Where the mask is False the score becomes -∞: here for {int((~keep).sum()):,} of {keep.numel():,} pairs. "
        "exp(-∞) is 0, so these keys get the weight 0, and the weights of the other keys sum to 1."
    )
    formula, code = "masked[i, j] = scores[i, j] if mask[i, j] else -∞", "masked = scores.masked_fill(~mask, -inf)"
    return [
        *steps,
        Step(
            "masked", formula, why, scores.masked_fill(~keep, -torch.inf), SCORES, code,
            lambda at: number(scores[at]) if bool(keep[at]) else "-∞",
            back={"scores": Back("d_scores[i, j] = {d}[i, j] if mask[i, j] else 0")},
        ),
    ]  # fmt: skip
