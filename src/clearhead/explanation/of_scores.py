"""A softmax over scores that are given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead._attention import Arguments
from clearhead.base.steps import Step
from clearhead.explanation.explanation import Explanation, Part
from clearhead.explanation.inputs import letters
from clearhead.explanation.scores_part import mask_part
from clearhead.explanation.shown import choose, settle
from clearhead.explanation.softmax_part import masked_after, softmax_part, wrong_axis
from clearhead.masks.base import Mask
from clearhead.problem.problem import ABSENT
from clearhead.scores.base import SCORES


def explain_softmax(scores: Tensor, mask: Mask | None, at: Any = None) -> Explanation:
    """The masked softmax of scores (..., Lq, Lk), over the keys."""
    keys = torch.eye(scores.shape[-1], dtype=scores.dtype, device=scores.device)  # so that query · key is the score
    keys = keys.expand(*scores.shape[:-2], *keys.shape)
    problem = Arguments(scores, keys, ABSENT, scale=1.0, mask=mask).problem()
    shown = choose(at, problem.sizes)
    why = "One number for each query and key: the better they fit, the larger it is."
    given = Step("scores", why, problem.query, SCORES)
    lead = [axis for axis in ("B", "H") if axis not in shown.absent]
    parts, last, otherwise, keep = [Part("Scores", (given,), letters(lead))], given, [], None
    if mask is not None:
        masked = mask_part(mask, problem.sizes, shown, given)
        parts.append(Part("Mask: who may see whom", tuple(masked)))
        last, otherwise, keep = masked[-1], masked_after(given, masked[-2]), masked[-2].value
    steps = softmax_part(problem, last)
    parts.append(Part("Softmax: from scores to weights", (*steps, *wrong_axis(last), *otherwise)))
    return Explanation("Softmax over the keys, step by step", tuple(parts), settle(shown, steps[-1].value, keep))
