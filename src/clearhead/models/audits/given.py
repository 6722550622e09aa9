"""The given test: was each attention call given the mask that is expected of it?"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.base.output.text import said
from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.masks.base import Mask, all_keys
from clearhead.masks.dense import DenseMask
from clearhead.masks.padding import Padding
from clearhead.models.audits.audit_report import AuditFinding, AuditTest
from clearhead.models.audits.expected_masks import describe_mask
from clearhead.models.interception.padding import same_words
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.problem._recorded import RecordedMask
from clearhead.problem.problem import Problem
from clearhead.problem.record import now
from clearhead.problem.unseen import seen
from clearhead.problem.visible import Visible, resolve, seen_by
from clearhead.problem.words import Words

TOLERANCE = 1e-6  # the share of a query's softmax that may be on wrong keys


class GivenTest:
    """Compares the pairs that each call allowed with those of its expected mask, by their share of the softmax."""

    def __init__(self) -> None:
        self._known, self._count = KnownPairs(), 0
        self._findings: list[AuditFinding] = []

    @torch.no_grad()
    def add(self, call: AttentionCall, expected: Mask) -> None:
        """Judge one call."""
        self._count += 1
        pairs = self._known.find(call, expected)
        if pairs.extra is None and pairs.missing is None:
            return
        shares = compute_shares(call, pairs)
        for queries in (pairs.attending, ~pairs.attending & pairs.rows):
            what, row = _find_worst(call, pairs, shares, queries)
            if not row.share <= TOLERANCE:  # NaN is a difference too
                self._findings.append(_make_finding(call, expected, pairs, what, row))
                return

    def make_test(self) -> AuditTest:
        """Return the result for all calls."""
        found = tuple(self._findings)
        if not found:
            return AuditTest("given", True, f"each of {self._count} attention calls was given this mask")
        text = f"{len(found)} of {self._count} attention calls were given another mask"
        return AuditTest("given", False, text, found)


def _make_finding(call: AttentionCall, expected: Mask, pairs: Pairs, what: str, row: WorstRow) -> AuditFinding:
    code, cause = find_cause(call, expected, pairs, what, row)
    text = _describe(call, expected, what, row) + (f"\nMay be: {cause}" if cause else "")
    output, source = (row.sequence, row.query), (row.sequence, row.most)
    return AuditFinding(code, "given", text, str(call.layer), call.name, (row.head,), output, source)


def _find_worst(
    call: AttentionCall, pairs: Pairs, shares: tuple[Tensor, Tensor], queries: Tensor
) -> tuple[str, WorstRow]:
    """Whether a mask "leaked" or "hidden" most of the softmax of these queries, and the row where it did."""
    rows = [
        (what, find_worst_row(call, part, share, queries))
        for what, part, share in zip(("leaked", "hidden"), (pairs.extra, pairs.missing), shares, strict=True)
        if part is not None
    ]
    return max(rows, key=lambda row: (row[1].share != row[1].share, row[1].share))


class Pairs(NamedTuple):
    """The pairs of a call and of an expected mask, in three disjoint parts; None for a part without a pair.

    `rows`, bool (B or 1, H or 1, Lq or 1): the queries that see a key in any part. `attending`: those that are
    expected to see one; the others, such as padding, are judged after them.
    """

    both: Visible | None
    extra: Visible | None  # allowed by the call alone
    missing: Visible | None  # allowed by the expected mask alone
    rows: Tensor
    attending: Tensor


class KnownPairs:
    """The pairs of the calls of one run: layers share a mask, for which they are made once."""

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[Words | None, Pairs]]] = {}
        self._kept: list[Any] = []  # the objects whose ids are in the keys

    def find(self, call: AttentionCall, expected: Mask) -> Pairs:
        problem = call.problem
        if infinite_bias(problem) is not None:
            return pairs_of(call, expected)
        sizes = problem.sizes
        which = expected.signature() or id(expected)
        mask = None if problem.visible is None else id(problem.visible.memo)  # copies of a mask have one memo
        key = (mask, which, sizes.shape, sizes.device, sizes.leading)
        known = self._known.setdefault(key, [])
        for padding, pairs in known:
            if same_words(call.padding, padding):
                return pairs
        self._kept += [problem.visible, expected]
        known.append((call.padding, pairs_of(call, expected)))
        return known[-1][1]


def pairs_of(call: AttentionCall, expected: Mask) -> Pairs:
    """The pairs that the call allowed and the expected ones. Padding is left out of both."""
    sizes, words = call.problem.sizes._replace(align="lower_right"), call.padding
    allowed = _find_allowed(call)
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
    return Pairs(both, extra, missing, rows[0] | rows[1] | rows[2], rows[0] | rows[2])


def _find_allowed(call: AttentionCall) -> Mask:
    problem = call.problem
    spans = problem.spans
    allowed: Mask = RecordedMask(all_keys(problem.sizes) if spans is None else spans, problem.sizes)
    infinite = infinite_bias(problem)
    return allowed if infinite is None else allowed & DenseMask(~infinite)


def infinite_bias(problem: Problem) -> Tensor | None:
    """Where the bias is −∞, which hides a pair as a mask does: a float mask of clearhead's own calls is a bias."""
    dense = None if problem.bias is None else problem.bias.dense
    found = None if dense is None else dense == -torch.inf
    return None if found is None or not bool(found.any()) else found


@torch.no_grad()
def compute_shares(call: AttentionCall, pairs: Pairs) -> tuple[Tensor, Tensor]:
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
def find_worst_row(call: AttentionCall, part: Visible, share: Tensor, queries: Tensor) -> WorstRow:
    """The row where the share, (B, H, Lq), is largest among these queries."""
    number = int(share.masked_fill(~queries.expand(share.shape), -1.0).flatten().argmax())
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


def _describe(call: AttentionCall, expected: Mask, what: str, row: WorstRow) -> str:
    """A call and its worst row, in words."""
    mask = call.mask
    given = "no mask" if call.problem.visible is None else "a mask" if mask is None else said(mask, mask.title)
    _, _, queries, keys = call.problem.sizes.shape
    if mask is not None and mask.positional and queries != keys:
        given += f" (align={call.problem.sizes.align!r})"
    first, last = int(row.keys[0]), int(row.keys[-1])
    which = f"key {first}" if first == last else f"{len(row.keys)} keys of {first} … {last}, most to key {row.most}"
    verb = "goes" if what == "leaked" else "should go"
    return (
        f"backend {call.backend}, run {call.run}: given {given}; expected {describe_mask(expected)}.\n"
        f"Head {row.head}, query {row.query} of sequence {row.sequence}: "
        f"{row.share:.3g} of the softmax {verb} to {which}."
    )


CAUSES = {  # what differs, by the code of the finding
    "mask-added": "a mask of 0 and 1 that is added to the scores: pass floats, 0 and −inf, or a bool mask to sdpa.",
    "mask-inverted": "a mask of the opposite meaning. True means 'may attend' to SDPA and transformers, and 'may not' "
    "to the masks of torch.nn's modules.",
    "causal-upper-left": "a causal mask aligned at the upper left, as is_causal=True of SDPA; or the empty slots of a "
    "static cache.",
    "mask-off-by-one": "a position counted off by one, such as the length of a key/value cache.",
    "packed-mask-ignored": "packed documents that the model sees as one text. transformers finds them by position_ids "
    "that restart, where it is given no attention_mask and no cache: pass use_cache=False.",
    "window-lost": "a sliding window that was lost: see config.sliding_window and config.layer_types.",
    "not-causal": "a causal mask that is missing: see is_causal.",
    "padding-mask-lost": "no mask reached this call: pass the tokenizer's attention_mask.",
    "causal-by-accident": "a causal mask in a model that should see both sides: see is_causal and config.is_decoder.",
    "mask-too-narrow": "a mask that hides more than was expected, such as a sliding window, or padding that the audit "
    "was not told of.",
    "mask-differs": "",
}


def find_cause(call: AttentionCall, expected: Mask, pairs: Pairs, what: str, row: WorstRow) -> tuple[str, str]:
    """The code of a finding, and the likeliest cause in words."""
    code = _find_code(call.problem, said(expected, expected.title), pairs, what, row)
    return code, CAUSES[code]


def _find_code(problem: Problem, expected: str, pairs: Pairs, what: str, row: WorstRow) -> str:
    sizes, keys = problem.sizes, row.keys.tolist()
    later = min(keys) > row.position
    dense = None if problem.bias is None else problem.bias.dense
    if dense is not None and set(dense.flatten().tolist()) == {0.0, 1.0}:
        return "mask-added"
    if pairs.both is None:
        return "mask-inverted"
    if keys in ([row.position], [row.position + 1]) and sizes.keys > 2:
        return "mask-off-by-one"
    empty = what == "hidden" and keys[-1] == sizes.keys - 1
    if sizes.queries < sizes.keys and (sizes.align == "upper_left" or empty):
        return "causal-upper-left"
    if what == "hidden":
        return "causal-by-accident" if later else "mask-too-narrow"
    if later and "Causal" in expected:
        return "not-causal"
    if "Documents" in expected:
        return "packed-mask-ignored"
    if "SlidingWindow" in expected:
        return "window-lost"
    names_padding = any(name in expected for name in ("Padding", "Lengths"))
    return "padding-mask-lost" if names_padding or problem.visible is None else "mask-differs"
