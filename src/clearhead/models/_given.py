"""What is recorded of a call of clearhead's own attention."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import Tensor

from clearhead._attention import Arguments
from clearhead.biases.base import Bias
from clearhead.masks.base import Mask
from clearhead.problem._recorded import RecordedMask
from clearhead.problem.given import with_given
from clearhead.problem.problem import Problem, as_score, make_problem
from clearhead.problem.reads import tensors_in
from clearhead.problem.record import Record, frozen, record
from clearhead.scores.base import ByTile, Score
from clearhead.scores.dot import Dot


def read(problem: Problem, call: Arguments, copy: bool) -> tuple[Record, Tensor, Tensor, Score, Mask | None]:
    """The record of a call, its query and key, and the score and the mask as given, over inputs not yet projected."""
    kept = record(problem._replace(sizes=problem.sizes._replace(leading=None)), copy=copy)
    scores, given = kept.problem.scores, as_score(call.score)
    if not copy:
        return kept, scores.query, scores.key, given, None
    kept = kept._replace(problem=_with_bias(kept.problem, call))
    if isinstance(scores, ByTile):
        return kept, scores.query, scores.key, scores.score, _mask(call.mask, kept.problem)
    if isinstance(given, Dot):
        score = Dot(scores.scale, scores.softcap)
        return kept, scores.query, scores.key, score, _mask(call.mask, kept.problem)
    # the inputs of its projections, of the dtype that autocast gave them
    written = make_problem(call.query, call.key, call.value, score=given, scale=call.scale, as_written=True).scores
    query, key = (t.detach().to(problem.query.dtype, copy=True) for t in (written.query, written.key))
    return kept, query, key, frozen(given), _mask(call.mask, kept.problem)


def _mask(given: Any, problem: Problem) -> Mask | None:
    """A copy of the mask that a person gave; its spans, where it holds a matrix. None where it is a bias alone."""
    if problem.spans is None:
        return None
    few = 4 * (problem.sizes.queries + problem.sizes.keys) * problem.sizes.batch
    if isinstance(given, Mask) and _numbers_in(given) <= few:
        return deepcopy(given)
    return RecordedMask(problem.spans, problem.sizes)


def _with_bias(problem: Problem, call: Arguments) -> Problem:
    """The problem with a copy of the bias that a person gave: where it has steps to show, and is no larger than query
    and key, of which there are copies too."""
    added = with_given(problem, call.bias, call.mask).bias
    given = None if added is None else added.given
    if added is None or given is None or type(given).steps is Bias.steps or problem.by_function:
        return problem
    if _numbers_in(given) > problem.query.numel() + problem.key.numel():
        return problem
    return problem._replace(bias=added._replace(given=frozen(given)))


def _numbers_in(given: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(given))
