"""The weights that a model returns beside its output, as its edits leave them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.base.tracing import unobserved, without_autocast
from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.models.edits._changed import Change
from clearhead.models.edits._recorded import edited
from clearhead.models.multiplied import weights_of
from clearhead.problem.record import now
from clearhead.scores.dot import Dot


def with_weights(change: Change, result: Any) -> Any:
    """A result (output, weights), whose weights (B, H, Lq, Lk), or their mean over heads, are the edited ones.

    All that is no such tensor stays as it is. What is changed has no gradient.
    """
    given = result[1] if isinstance(result, tuple) and len(result) > 1 else None
    batch, heads, queries, keys = change.problem.sizes.shape
    if not isinstance(given, Tensor) or given.shape not in ((batch, heads, queries, keys), (batch, queries, keys)):
        return result
    with torch.no_grad(), unobserved(), without_autocast(given.device):
        inside = torch.zeros(1, heads, queries, 1, dtype=torch.bool, device=given.device)
        for _, numbers, rows in change.regions:
            of_rows = torch.from_numpy(rows).to(given.device)[None, :, None]
            inside[:, list(numbers)] |= of_rows
        new = edited_weights(change).dense(None)
        if given.ndim == 3:
            before = change.problem._replace(value=None)
            old = Weights(FromRecord(now(before._replace(sizes=before.sizes._replace(leading=None))), {})).dense(None)
            moved = torch.where(inside, new - old, 0.0).mean(1)
    if given.ndim == 3:
        return (result[0], given + moved.to(given.dtype), *result[2:])
    return (result[0], torch.where(inside, new.to(given.dtype), given), *result[2:])


def edited_weights(change: Change) -> Weights:
    """The weights of a call with its edits, (B, H, Lq, Lk)."""
    ran = edited(change, Dot(), change.problem.query, None, "the model", values=False)
    problem = ran.problem._replace(sizes=ran.problem.sizes._replace(leading=None))
    return weights_of(FromRecord(now(problem), {}), None, ran.factor)
