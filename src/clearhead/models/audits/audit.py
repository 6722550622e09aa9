"""The calls of a recording are compared with the masks that were expected of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import to_tensor
from clearhead.base.errors import ClearheadError
from clearhead.base.numbers import check_number
from clearhead.base.output.text import said
from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.masks.base import Mask, Spans
from clearhead.masks.dense import DenseMask
from clearhead.masks.padding import Padding
from clearhead.models.audits.audit_text import describe_call
from clearhead.models.interception.padding import same_words
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.models.recordings.call import Call
from clearhead.models.recordings.calls import Calls, chosen_calls
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
        if infinite_bias(problem) is not None:
            return pairs_of(call, expected)
        sizes = problem.sizes
        which = expected.signature() or id(expected)
        mask = None if problem.visible is None else id(problem.visible.memo)  # copies of a mask have one memo
        key = (mask, which, sizes.shape, sizes.device, sizes.leading)
        known = self._known.setdefault(key, [])
        for other, _, pairs in known:  # the entries keep the objects alive whose ids are in the key
            if same_words(call.padding, other.padding):
                return pairs
        known.append((call, expected, pairs_of(call, expected)))
        return known[-1][2]


def pairs_of(call: AttentionCall, expected: Mask) -> Pairs:
    """The pairs that the call allowed and the expected ones. Padding is left out of both."""
    sizes, words = call.problem.sizes._replace(align="lower_right"), call.padding
    allowed = _allowed(call)
    if expected._document_edges is not None:  # beside it, the masks of the row would count inside its documents
        expected = RecordedMask(expected._resolve(sizes), sizes)
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
    infinite = infinite_bias(problem)
    return allowed if infinite is None else allowed & DenseMask(~infinite)


def infinite_bias(problem: Problem) -> Tensor | None:
    """Where the bias is −∞, which hides a pair as a mask does: a float mask of clearhead's own calls is a bias."""
    dense = None if problem.bias is None else problem.bias.dense
    found = None if dense is None else dense == -torch.inf
    return None if found is None or not bool(found.any()) else found


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
    bias, infinite = problem.bias, infinite_bias(problem)
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


One = Mask | Tensor | np.ndarray | Callable[[AttentionCall], Any] | None
Expected = One | Mapping[str, One] | Mapping[int | str, One]


def expected_of(calls: Sequence[AttentionCall], expected: Any) -> list[tuple[AttentionCall, Mask]]:
    """The calls that have an expected mask, each with its mask; equal expectations give one object."""
    made: dict[Any, tuple[Any, Mask]] = {}
    if not isinstance(expected, Mapping):
        return [(call, _mask(expected, call, made)) for call in calls]
    numbers = [(set(chosen_calls(calls, which, "check")), mask) for which, mask in expected.items()]
    each = [[mask for some, mask in numbers if number in some] for number in range(len(calls))]
    return [(call, _mask(masks[0], call, made)) for call, masks in zip(calls, each, strict=True) if masks]


def _mask(expected: Any, call: AttentionCall, made: dict[Any, tuple[Any, Mask]]) -> Mask:
    if not isinstance(expected, Mask | type) and callable(expected):
        expected = expected(call)
    if isinstance(expected, Mask):
        return expected
    sizes = call.problem.sizes
    if expected is None:
        if sizes.shape not in made:
            whole = torch.zeros(1, 1, 1, dtype=torch.int64, device=sizes.device)
            made[sizes.shape] = None, RecordedMask(Spans(whole, whole + sizes.keys), sizes, "every key")
        return made[sizes.shape][1]
    if not isinstance(expected, Tensor | np.ndarray):
        raise ClearheadError(
            f"check: {expected!r:.60} is expected of {call.name}; use a Mask, such as ch.Causal(), a bool tensor, True "
            "for may attend, None for every key, a function of the call that gives one, or a dict of them by layers."
        )
    queries, keys = sizes.queries, sizes.keys
    key = (id(expected), queries, keys)
    if key not in made:  # `expected` is kept, so that no other object can have its id
        keep = to_tensor(expected, "expected")
        if keep.ndim > 1 and keep.shape[-1] == keep.shape[-2] and keep.shape[-1] >= keys >= queries:  # a whole sequence
            keep = keep[..., keys - queries : keys, :keys]
        made[key] = expected, DenseMask(keep)
    return made[key][1]


@dataclass(frozen=True, eq=False)
class AuditedCall(Call):
    """An attention call, compared with the mask that was expected of it.

    `leaked` (B, H, Lq): the share of each query's softmax on keys that `expected` does not allow. `hidden` (B, H, Lq):
    the share of its softmax under `expected` on keys that the call did not allow. Both are float32 at least, from 0 to
    1, and exactly 0 where the masks agree. `queries`, bool (B, H, Lq): the queries that count, which are no padding and
    to which the call or `expected` allows a key. `call`: the record. `most_leaked`, `most_hidden`: the query with the
    largest share, and its keys; None where no pair is leaked or hidden. `disjoint`: whether no pair is allowed by both.
    """

    call: AttentionCall
    expected: Mask
    leaked: Tensor
    hidden: Tensor
    queries: Tensor
    most_leaked: WorstRow | None
    most_hidden: WorstRow | None
    disjoint: bool

    # the parts of a `Call` are those of the record
    name = property(attrgetter("call.name"))
    kind = property(attrgetter("call.kind"))
    backend = property(attrgetter("call.backend"))
    shape = property(attrgetter("call.shape"))
    run = property(attrgetter("call.run"))
    layer = property(attrgetter("call.layer"))

    @property
    def most(self) -> float:
        """The largest share, leaked or hidden, of all queries that count; NaN where a share is NaN."""
        shares = torch.maximum(self.leaked, self.hidden).masked_fill(~self.queries, 0.0)
        return float(shares.max()) if shares.numel() else 0.0

    @property
    def heads(self) -> Mapping[str, Tensor]:
        """By name, for each head, (H,), float64: the mean and the largest share over the queries that count."""
        count = self.queries.sum((0, 2))
        found = {}
        for name, share in (("leaked", self.leaked), ("hidden", self.hidden)):
            counted = share.double().masked_fill(~self.queries, 0.0)
            by_head = counted.transpose(0, 1).flatten(1)
            found[name] = by_head.sum(1) / count
            found[f"most {name}"] = by_head.amax(1) if by_head.shape[1] else by_head.sum(1)
        return found

    def _by_head(self) -> Mapping[str, Iterable[object]]:
        return {"head": range(self.shape[1]), **{name: values.tolist() for name, values in self.heads.items()}}

    def __repr__(self) -> str:
        return said(self, self._said)

    def _said(self) -> str:
        shares = ", ".join(f"{name} {float(values.mean()):.3g}" for name, values in list(self.heads.items())[::2])
        return f"AuditedCall({self.name!r}, {shares})"


TOLERANCE = 1e-6


class Audit(Calls[AuditedCall]):
    """The pairs that each call of a recording allowed, compared with a mask. `Recording.check` gives it.

    >>> import torch, clearhead as ch
    >>> block, x = ch.nn.DotProductAttention(), torch.zeros(1, 2, 4, 8)
    >>> with ch.watch(block) as seen:
    ...     output = block(x, x, x)
    >>> audit = seen.check(ch.Causal())
    >>> audit.ok()
    False
    >>> audit.worst.leaked[0, 0]                        # of each query: the share on keys that it should not see
    tensor([0.7500, 0.5000, 0.2500, 0.0000])
    >>> audit.table()[0]["hidden"]
    0.0

    Calls are found as in a `Recording`, by number, module and run: each is an `AuditedCall`, with `leaked` and
    `hidden`. `worst`: the call with the largest share. `str(audit)` names the first call that is not as expected, its
    worst head and query, the keys on which the mass is, and a likely cause. The columns of `table()`: layer, run,
    module, kind, backend, queries, keys, head; leaked and hidden, means over the queries that count; most leaked and
    most hidden, the largest shares of these queries.
    """

    @property
    def worst(self) -> AuditedCall:
        """The call with the largest share of a query, leaked or hidden; a call with NaN comes before all others."""
        return max(self.calls, key=lambda call: (call.most != call.most, call.most))

    def ok(self, tolerance: float = TOLERANCE) -> bool:
        """Whether no query of any call has more than `tolerance` of its softmax leaked or hidden."""
        most = _checked(tolerance)
        return all(call.most <= most for call in self.calls)

    def __str__(self) -> str:
        return said(self, self.told)

    def told(self, tolerance: float = TOLERANCE) -> str:
        """The text of `str(audit)`, for another tolerance."""
        most = _checked(tolerance)
        wrong = [call for call in self.calls if not call.most <= most]
        if not wrong:
            return f"{len(self.calls)} calls attend as expected."
        return (
            f"{len(wrong)} of {len(self.calls)} calls do not attend as expected. The first:\n{describe_call(wrong[0])}"
        )


def _checked(tolerance: float) -> float:
    number = check_number(tolerance, "tolerance")
    if not 0 <= number < 1:
        raise ClearheadError(f"tolerance is {tolerance!r}; expected a share of the softmax, from 0 to below 1.")
    return number


def audit(calls: Sequence[AttentionCall], expected: Expected) -> Audit:
    """Each call that has an expected mask, compared with it. See `Recording.check`."""
    known, masks, found = KnownPairs(), expected_of(calls, expected), []
    if not masks:
        raise ClearheadError("check: no mask is expected of a call, or there is no call.")
    for call, mask in masks:
        pairs = known.of(call, mask)
        leaked, hidden = shares(call, pairs)
        queries = pairs.rows.expand(leaked.shape)
        most_leaked = worst_row(call, pairs.extra, leaked, queries)
        most_hidden = worst_row(call, pairs.missing, hidden, queries)
        disjoint = pairs.both is None
        found.append(AuditedCall(call, mask, leaked, hidden, queries, most_leaked, most_hidden, disjoint))
    return Audit(found)
