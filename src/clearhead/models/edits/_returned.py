"""The weights that a model returns beside its output, as its edits leave them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clearhead.base.tracing import unobserved, without_autocast
from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.models.edits._changed import Change
from clearhead.models.edits._recorded import edited
from clearhead.models.multiplied import weights_of
from clearhead.problem.problem import Problem
from clearhead.problem.record import Record, now, record
from clearhead.scores.dot import Dot


def with_weights(change: Change, result: Any) -> Any:
    """A result (output, weights), whose weights (B, H, Lq, Lk), or their mean over heads, are the edited ones.

    One sequence may come without its batch dimension. All that is no such tensor stays as it is. What is changed has no
    gradient.
    """
    given = result[1] if isinstance(result, tuple) and len(result) > 1 else None
    batch, heads, queries, keys = change.problem.sizes.shape
    every: list[tuple[int, ...]] = [(batch, heads, queries, keys)]
    mean: list[tuple[int, ...]] = [(batch, queries, keys)]
    if batch == 1:
        every, mean = [*every, (heads, queries, keys)], [*mean, (queries, keys)]
    if not isinstance(given, Tensor) or given.shape not in every + mean:
        return result
    averaged = given.shape in mean  # of one head, both are the same
    with torch.no_grad(), unobserved(), without_autocast(given.device):
        inside = torch.zeros(1, heads, queries, 1, dtype=torch.bool, device=given.device)
        for _, numbers, rows in change.regions:
            of_rows = torch.from_numpy(rows).to(given.device)[None, :, None]
            inside[:, list(numbers)] |= of_rows
        new = edited_weights(change).dense(None)
        if averaged:
            before = change.problem._replace(value=None)
            old = Weights(FromRecord(now(before._replace(sizes=before.sizes._replace(leading=None))), {})).dense(None)
            moved = torch.where(inside, new - old, 0.0).mean(1)
    if averaged:
        old = given.view(batch, queries, keys)
        new = torch.where(inside.any(1), (old + moved.to(old.dtype)).detach(), old)  # no head's old gradient is left
        return (result[0], new.view(given.shape), *result[2:])
    kept = given.view(new.shape)
    return (result[0], torch.where(inside, new.to(given.dtype), kept).view(given.shape), *result[2:])


class RanEdited:
    """What edits made of a call of clearhead's own attention, for a module that gives its weights."""

    def __init__(self, change: Change) -> None:
        self._change = change

    def later(self, numpy: bool) -> Callable[[], Weights]:
        problem = self._change.problem
        value = None if problem.value is None else problem.value.detach()
        change = self._change._replace(problem=record(problem, fresh=True).problem._replace(value=value))

        def made() -> Weights:
            with torch.no_grad(), unobserved():
                return edited_weights(change, numpy, record)

        return made

    def returned(self, weights: Tensor) -> Tensor:
        found: Tensor = with_weights(self._change, (None, weights))[1]
        return found


def edited_weights(change: Change, numpy: bool = False, kept: Callable[[Problem], Record] = now) -> Weights:
    """The weights of a call with its edits, (B, H, Lq, Lk). `kept`: `record`, where they may be read later."""
    ran = edited(change, Dot(), change.problem.query, None, "the model", values=False)
    problem = ran.problem._replace(sizes=ran.problem.sizes._replace(leading=None))
    return weights_of(FromRecord(kept(problem), {}, numpy), None, ran.factor)
