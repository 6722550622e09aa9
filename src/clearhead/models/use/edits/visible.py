"""Keys hidden from all queries of a problem."""

from __future__ import annotations

from functools import reduce
from operator import and_

import numpy as np
import torch

from clearhead.masks.base import Between, Mask
from clearhead.masks.dense import DenseMask
from clearhead.problem._recorded import RecordedMask
from clearhead.problem.problem import Problem
from clearhead.problem.visible import resolve

RUNS = 3  # more of them are no spans of a few intervals


def without_keys(problem: Problem, cut: np.ndarray) -> Problem:
    """The same problem, in which no query sees these keys, bool (Lk,)."""
    sizes = problem.sizes._replace(leading=None)
    edges = np.flatnonzero(np.diff(cut.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    if len(edges) <= RUNS:
        masks: list[Mask] = [~Between(int(start), int(stop)) for start, stop in edges]
    else:
        masks = [DenseMask(torch.from_numpy(~cut).to(sizes.device)[None, None, None])]
    if problem.spans is not None:
        masks = [RecordedMask(problem.spans, sizes), *masks]
    return problem._replace(visible=resolve(reduce(and_, masks), sizes, as_written=False))
