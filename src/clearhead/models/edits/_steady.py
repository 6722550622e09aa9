"""Whether an edit of somebody's own gives the same each time: else what is recorded is not what ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from clearhead.base.errors import UnsupportedError
from clearhead.masks.base import Spans
from clearhead.models.edits._changed import before, factor_of, gone
from clearhead.models.edits.base import Edit
from clearhead.models.edits.spot import Spot
from clearhead.problem.checked import ours
from clearhead.problem.problem import Problem
from clearhead.problem.record import EVERY


def check_steady(problem: Problem, edits: Sequence[Edit], spot: Spot, name: str) -> None:
    """Raise where an edit gives two different answers for one problem, as one that draws random numbers does."""
    for one in edits:
        if ours(one):
            continue
        first, second = ((before(problem, [one], spot), gone([one], spot), factor_of([one])) for _ in range(2))
        alike = _same_problem(first[0], second[0]) and np.array_equal(first[1], second[1])
        if not (alike and (first[2] == second[2])):
            raise UnsupportedError(
                f"{name}: {type(one).__name__} gives another problem, other keys or another factor each time it is "
                "asked, so that a record would not be of what ran. Let it give the same for the same call, with random "
                "numbers drawn once or from a generator that it seeds; or look at the model outside of the edit's "
                "`with`."
            )


def _same_problem(one: Problem, other: Problem) -> bool:
    if one is other:
        return True
    if type(one.scores) is not type(other.scores):
        return False
    parts = [*zip(one.scores, other.scores, strict=True), (one.value, other.value), (one.sinks, other.sinks)]
    if not all(_same(a, b) for a, b in parts):
        return False
    biases = [(None, None) if p.bias is None else (p.bias.dense, p.bias.relative) for p in (one, other)]
    return all(_same(a, b) for a, b in zip(*biases, strict=True)) and _same_mask(one.spans, other.spans)


def _same_mask(one: Spans | None, other: Spans | None) -> bool:
    if one is other:
        return True
    if one is None or other is None:
        return False
    gaps = [(None, None) if spans.gaps is None else spans.gaps for spans in (one, other)]
    edges = zip((one.start, one.stop, *gaps[0]), (other.start, other.stop, *gaps[1]), strict=True)
    if not all(_same(a, b) for a, b in edges) or (one.residual is None) != (other.residual is None):
        return False
    return one.residual is other.residual or _same(one.rest(*EVERY), other.rest(*EVERY))


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    return not isinstance(one, int | float | str) or bool(one == other)
