"""Large negative numbers in a bias that mask keys, such as −10000, read as a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.masks.base import Mask
from clearhead.masks.dense import DenseMask
from clearhead.problem._recorded import RecordedMask
from clearhead.problem.extent import extent
from clearhead.problem.problem import Problem
from clearhead.problem.visible import Visible, resolve

FILL = -9e3  # a bias up to this number masks a key: exp of it is 0. BERT's −10000 is −9984 in bfloat16


def taken_apart(problem: Problem) -> tuple[Problem, Tensor | None]:
    """Move the fills of a dense bias into the mask; return the problem, and queries that have only fills.

    Such a query, True in a bool tensor (B or 1, H or 1, Lq or 1), has a finite fill at every key that its mask allows.
    The softmax cancels the fill, so the query attends to all of these keys. The tensor is None if there is no fill.
    """
    bias = problem.bias
    if bias is None or bias.dense is None or not bool((bias.dense <= FILL).any()):
        return problem, None
    dense = bias.dense
    keep, possible = ~(dense <= FILL), dense != -torch.inf
    left, at_first = (extent(_seeing(problem, which)).allowed for which in (keep, possible))
    blind = (left == 0) & (at_first > 0)
    rows = blind.unsqueeze(-1)
    found = _seeing(problem, torch.where(rows, possible, keep))
    rest = dense.masked_fill(dense <= FILL, 0.0)
    if bool(blind.any()):
        rest = rest.masked_fill(rows, 0.0)
    left_over = bias._replace(dense=rest if bool(rest.any()) else None)
    return found._replace(bias=left_over if left_over.tensors or left_over.function else None), blind


def _seeing(problem: Problem, keep: Tensor) -> Problem:
    """Return the problem whose mask is joined with another one, bool (B or 1, H or 1, Lq or 1, Lk or 1)."""
    mask: Mask = DenseMask(keep)
    if problem.spans is not None:
        mask = RecordedMask(problem.spans, problem.sizes) & mask
    found: Visible = resolve(mask, problem.sizes._replace(leading=None), as_written=False)
    return problem._replace(visible=found)
