"""The bias as it was given. Its normal form does not hold it, but an explanation asks it for its steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from clearhead.base.arrays import to_tensor
from clearhead.biases.base import Bias
from clearhead.biases.dense import DenseBias
from clearhead.problem.problem import Problem


def with_given(problem: Problem, bias: Any, mask: Any) -> Problem:
    """The same problem, whose `Added` knows its bias: the argument `bias`, and `mask` where the mask is added too."""
    if problem.bias is None:
        return problem
    given = [] if bias is None else [bias if isinstance(bias, Bias) else DenseBias(bias)]
    if isinstance(mask, Tensor | np.ndarray) and to_tensor(mask, "mask").is_floating_point():
        given.append(DenseBias(mask))
    return problem._replace(bias=problem.bias._replace(given=sum(given[1:], start=given[0])))
