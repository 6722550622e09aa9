"""The pairs by which a call's mask differs from another mask, and their share of the softmax."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.masks.base import Mask, Spans
from clearhead.masks.dense import DenseMask
from clearhead.masks.padding import Padding
from clearhead.models.attention_call import AttentionCall
from clearhead.problem._recorded import RecordedMask
from clearhead.problem.problem import Problem
from clearhead.problem.record import now
from clearhead.problem.unseen import seen
from clearhead.problem.visible import Visible, resolve, seen_by


class Pairs(NamedTuple):
    """The pairs of a call and of an expected mask, in three disjoint parts; None for a part without a pair.

    `rows`, bool (B or 1, H or 1, Lq or 1): the queries that see a key in any part.
    """

    both: Visible | None
    extra: Visible | None  # allowed by the call alone
    missing: Visible | None  # allowed by the expected mask alone
    rows: Tensor


class KnownPairs:
    """The pairs of the calls of one recording: layers share a mask, for which they are made once."""

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[AttentionCall, Mask, Pairs]]] = {}

    def of(self, call: AttentionCall, expected: Mask) -> Pairs:
        problem = call.problem
        if _infinite(problem) is not None:
            return pairs_of(call, expected)
        sizes = problem.sizes
        which = expected.signature() or id(expected)
        mask = None if problem.visible is None else id(problem.visible.memo)  # copies of a mask have one memo
        key = (mask, which, sizes.shape, sizes.device, sizes.leading)
        known = self._known.setdefault(key, [])
        for other, _, pairs in known:  # the entries keep the objects alive whose ids are in the key
            if _same_padding(call, other):
                return pairs
        known.append((call, expected, pairs_of(call, expected)))
        return known[-1][2]


def pairs_of(call: AttentionCall, expected: Mask) -> Pairs:
    """The pairs that the call allowed and the expected ones. Padding is left out of both."""
    sizes, words = call.problem.sizes._replace(align="lower_right"), call.padding
    allowed = _allowed(call)
    if words is not None and words.keys is not None:
        expected = expected & Padding(words.keys)
    parts = [resolve(mask, sizes, as_written=False) for mask in (allowed & expected, allowed & ~expected)]
    parts.append(resolve(expected & ~allowed, sizes, as_written=False))
    if words is not None and words.queries is not None:
        parts = [seen_by(words.queries, part, sizes) for part in parts]
    rows = [seen(part.spans, sizes)[1] for part in parts]
    there = 0 not in sizes.shape  # the mask of an empty batch has pairs too
    found = (part if there and bool(some.any()) else None for part, some in zip(parts, rows, strict=True))
    both, extra, missing = found
    return Pairs(both, extra, missing, rows[0] | rows[1] | rows[2])


def _allowed(call: AttentionCall) -> Mask:
    problem = call.problem
    spans = problem.spans
    if spans is None:
        whole = torch.zeros(1, 1, 1, dtype=torch.int64, device=problem.sizes.device)
        spans = Spans(whole, whole + problem.sizes.keys)
    allowed: Mask = RecordedMask(spans, problem.sizes)
    infinite = _infinite(problem)
    return allowed if infinite is None else allowed & DenseMask(~infinite)


def _infinite(problem: Problem) -> Tensor | None:
    """Where the bias is −∞, which hides a pair as a mask does: a float mask of clearhead's own calls is a bias."""
    dense = None if problem.bias is None else problem.bias.dense
    found = None if dense is None else dense == -torch.inf
    return None if found is None or not bool(found.any()) else found


def _same_padding(one: AttentionCall, other: AttentionCall) -> bool:
    if one.padding is None or other.padding is None:
        return one.padding is other.padding
    sides = zip(one.padding, other.padding, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in sides)


@torch.no_grad()
def shares(call: AttentionCall, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """The share of each query's softmax on extra pairs, and of its expected softmax on missing pairs, (B, H, Lq) each.

    The share is exp(a) / (exp(a) + exp(b)), with the log-sum-exp a of these pairs and b of the others. The sigmoid of
    a − b gives it to full relative precision; 1 − (the share of the others) has no digits left below 1e-7.
    """
    problem = call.problem
    nothing = torch.zeros((), dtype=call.weights.dtype, device=problem.sizes.device).expand(problem.sizes.shape[:3])
    if pairs.extra is None and pairs.missing is None:
        return nothing, nothing
    rest = log_sum_exp(call, pairs.both)
    if problem.sinks is not None:
        rest = torch.logaddexp(rest, problem.sinks.to(rest.dtype)[:, None])
    found = []
    for part in (pairs.extra, pairs.missing):
        if part is None:
            found.append(nothing)
            continue
        mine = log_sum_exp(call, part)
        found.append(torch.where(mine == -torch.inf, 0.0, torch.sigmoid(mine - rest)))
    leaked = found[0] if call.factor is None else found[0] * call.factor.abs().to(found[0].dtype)
    return leaked, found[1]


def weights_of(call: AttentionCall, part: Visible) -> Weights:
    """The softmax over these pairs alone."""
    problem = call.problem._replace(visible=part, sinks=None)
    bias, infinite = problem.bias, _infinite(problem)
    if bias is not None and bias.dense is not None and infinite is not None:
        problem = problem._replace(bias=bias._replace(dense=bias.dense.masked_fill(infinite, 0.0)))
    call.record.check()
    return Weights(FromRecord(now(problem), {}))


def log_sum_exp(call: AttentionCall, part: Visible | None) -> Tensor:
    """log Σ exp(score) over these pairs, (B, H, Lq); −∞ for a query without such a pair."""
    if part is None:
        sizes = call.problem.sizes
        return torch.full(sizes.shape[:3], -torch.inf, dtype=call.weights.dtype, device=sizes.device)
    found: Tensor = weights_of(call, part).logsumexp()
    return found


class WorstRow(NamedTuple):
    """The query of a call with the largest share of its softmax on some pairs.

    `position`: its place among the keys. `share`: of its softmax on these pairs. `keys`: of these pairs, int64,
    ascending. `most`: the key of them with the largest weight, `of_most`.
    """

    sequence: int
    head: int
    query: int
    position: int
    share: float
    keys: Tensor
    most: int
    of_most: float


@torch.no_grad()
def worst_row(call: AttentionCall, part: Visible | None, share: Tensor, queries: Tensor) -> WorstRow | None:
    """The row where the share, (B, H, Lq), is largest among these queries; None where there is no pair."""
    if part is None:
        return None
    number = int(share.masked_fill(~queries, -1.0).flatten().argmax())
    sequence, head, query = (int(i) for i in np.unravel_index(number, tuple(share.shape)))
    sizes = call.problem.sizes
    at = slice(sequence, sequence + 1), slice(head, head + 1), slice(query, query + 1)
    keep = part.spans.keep(*at, slice(None), sizes.keys).expand(1, 1, 1, sizes.keys)
    row = weights_of(call, part)[sequence, head, query]
    most, value = int(row.argmax()), float(share[sequence, head, query])
    position = query + sizes.keys - sizes.queries
    return WorstRow(
        sequence, head, query, position, value, keep[0, 0, 0].nonzero()[:, 0], most, value * float(row[most])
    )
