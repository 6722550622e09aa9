"""Operands made finite, with a poison that gives NaN to the queries that attend to a non-finite number."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clearhead.problem.problem import Problem
from clearhead.problem.unseen import finite, group, zero
from clearhead.problem.visible import all_seen, seen_of


def zero_unseen(problem: Problem, only_not_finite: bool = False) -> Problem:
    """Set keys to 0 that no query attends to, and fully masked queries; or only their non-finite numbers."""
    visible = problem.visible
    if visible is None or visible.unseen == "none" or all_seen(visible, problem.sizes):
        return problem
    keys, queries = seen_of(visible, problem.sizes)
    keys = group(keys, problem.key.shape[1])
    query, key = zero(problem.query, queries, only_not_finite), zero(problem.key, keys, only_not_finite)
    value = None if problem.value is None else zero(problem.value, keys, only_not_finite)
    unseen = visible.unseen if only_not_finite else "none"
    scores = problem.scores._replace(query=query, key=key)
    return problem._replace(scores=scores, value=value, visible=visible._replace(unseen=unseen))


def guard(problem: Problem) -> Problem:
    """Return the problem with finite operands, and a poison for operands that were not finite.

    The poison is NaN for queries and keys (values) that are not finite, else 0. It is added to the scores before the
    mask, so it reaches only the queries that may attend to such a key. Without it a masked NaN would reach every query,
    because 0 · NaN is NaN. A problem with a poison is guarded already.
    """
    if problem.poison is not None:
        return problem
    problem = zero_unseen(problem)
    query, key, value = problem.query, problem.key, problem.value
    with_keys = (key,) if value is None else (key, value)
    if problem.visible is None:  # a NaN key reaches every query anyway; a NaN query reaches no other query
        if finite(query):
            return problem
        scores = problem.scores._replace(query=_finite_part(query))
        none = torch.zeros(key.shape[:-1], dtype=torch.float32, device=key.device)
        return problem._replace(scores=scores, poison=(_poison(query).unsqueeze(-1), none.unsqueeze(-2)))
    if all(map(finite, (query, *with_keys))):
        return problem
    scores = problem.scores._replace(query=_finite_part(query), key=_finite_part(key))
    return problem._replace(
        scores=scores,
        value=None if value is None else _finite_part(value),
        poison=(_poison(query).unsqueeze(-1), _poison(*with_keys).unsqueeze(-2)),
    )


def _finite_part(tensor: Tensor) -> Tensor:
    return tensor.masked_fill(~tensor.isfinite(), 0.0)


def _poison(*tensors: Tensor) -> Tensor:
    """Return 0 where all the vectors are finite, NaN elsewhere, (B, H, L)."""
    bad = torch.stack([~t.detach().isfinite().all(-1) for t in tensors]).any(0)
    return torch.zeros(bad.shape, dtype=torch.float32, device=bad.device).masked_fill(bad, math.nan)
