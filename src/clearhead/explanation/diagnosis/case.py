"""The call that checks look at, and the statistics that several of them judge by."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from clearhead.engines.tiled import tiles
from clearhead.explanation.diagnosis.diagnosis import Finding, Severity
from clearhead.inspection.reductions.by_query import Entropy, MaxScore, SinkShare, TopK
from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.masks.base import Mask, Spans
from clearhead.problem.extent import Extent, extent
from clearhead.problem.guard import guard
from clearhead.problem.problem import Problem
from clearhead.problem.record import now
from clearhead.problem.region import EVERY, Region
from clearhead.problem.regions import cut, width
from clearhead.problem.unseen import group, seen
from clearhead.problem.words import ALL_WORDS, Words

WIDE = 64  # queries at once where a band around the diagonal is looked at
Findings = Iterator[Finding]


def sees_neighbours(problem: Problem, offset: int) -> tuple[Tensor, Tensor, Tensor]:
    """Whether query i may see the key before its own place, at it, and after it: three bool (B or 1, H or 1, Lq).

    `offset`: the place of query 0 among the keys. A place without a key is not seen.
    """
    spans, (_, _, queries, keys) = problem.spans, problem.sizes.shape
    assert spans is not None
    found = []
    for row in range(0, queries, WIDE):
        last = min(row + WIDE, queries)
        low, size = row + offset - 1, last - row + 2  # the first place, and the number of places
        columns = slice(*(min(max(edge, 0), keys) for edge in (low, low + size)))
        keep = spans.keep(EVERY, EVERY, slice(row, last), columns, keys).expand(-1, -1, last - row, -1)
        left = min(max(-low, 0), size)
        keep = torch.nn.functional.pad(keep, (left, size - left - keep.shape[-1]))
        found.append(torch.stack([keep.diagonal(n, -2, -1) for n in range(3)]))
    before, own, after = torch.cat(found, -1)
    return before, own, after


PAIRS = 2**27  # of more pairs, statistics are of evenly spaced queries: about a second of work
ROWS, NUMBERS = 32, 2**22  # the most queries of which every score is computed, and the most numbers at once


class OfQueries(NamedTuple):
    """Statistics of the queries in `queries`, each (B, H, n): see `Case.rows`."""

    queries: range
    entropy: Tensor
    largest_score: Tensor
    largest_weight: Tensor
    largest_key: Tensor
    sink_share: Tensor
    visible: Tensor  # how many keys each query may see
    counted: Tensor  # bool: queries that see a key, are not padding, and are finite

    @property
    def choosing(self) -> Tensor:
        """Counted queries that may see two keys or more: with one key the entropy is always 0."""
        return self.counted & (self.visible > 1)


@dataclass(frozen=True, eq=False)
class Case:
    """A call of attention, as checks look at it.

    `problem`: its normal form, detached, without a value. `inputs`: query, key, and the value where it is known, as
    given, (B, H, L, E). `memory`: the shape of the tensor that an input is a view of, where both have the same order in
    memory. `length_first`: the inputs (L, B, E) of a module that takes the length first. `added`: float tensors that
    were added to the scores, by the caller's names. `mask`: the mask that `problem.visible` came from. `blind`, bool
    (B or 1, H or 1, Lq or 1): queries that have a finite fill at every key, which has no effect on their weights.
    `words`: the positions that are not padding, where they are known. `output`: the output, where it was kept; `factor`
    (B, H, Lq): the number by which an edit multiplied each row of its weights after the softmax. `unaligned`: whether a
    mask or bias needs positions and no alignment was given. `parameters`: those of the score, or of the module that was
    called, by name; `factors`: the names of those that multiply or are multiplied, in which −∞ is never right;
    `given_finite`: whether all that the call or this module was given is finite. `where`: the place of the call, for
    its findings.
    """

    problem: Problem
    inputs: Mapping[str, Tensor]
    memory: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    length_first: Mapping[str, Tensor] = field(default_factory=dict)
    added: Mapping[str, Tensor] = field(default_factory=dict)
    mask: Mask | None = None
    blind: Tensor | None = None
    words: Words = ALL_WORDS
    output: Tensor | None = None
    factor: Tensor | None = None
    unaligned: bool = False
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    factors: frozenset[str] = frozenset()
    given_finite: bool = False
    where: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Lq, Lk)."""
        return self.problem.sizes.shape

    @property
    def as_mask(self) -> list[str]:
        """The names of what was added to the scores and was given as a mask."""
        return [name for name in self.added if name in ("mask", "attn_mask")]

    @cached_property
    def broken(self) -> dict[str, Tensor]:
        """The parameters with NaN or +∞; and those with −∞, but for those that may be added to scores (sinks, a bias)
        where query, key and value are finite."""
        finite = all(bool(tensor.isfinite().all()) for tensor in self.inputs.values())
        found = {}
        for name, tensor in self.parameters.items():
            low = finite and name not in self.factors
            wrong = tensor.isnan() | (tensor == torch.inf) if low else ~tensor.isfinite()
            if bool(wrong.any()):
                found[name] = tensor
        return found

    @cached_property
    def real(self) -> Tensor:
        """The queries that are neither padding nor `blind`, bool (B, H, Lq)."""
        batch, heads, queries, _ = self.shape
        real = torch.ones(batch, heads, queries, dtype=torch.bool, device=self.problem.sizes.device)
        if self.words.queries is not None:
            real = real & self.words.queries.unsqueeze(1)
        return real if self.blind is None else real & ~self.blind

    @cached_property
    def extent(self) -> Extent:
        """The first key, the end, and the number of the keys that each query may see."""
        return extent(self.problem)

    @cached_property
    def seen(self) -> tuple[Tensor, Tensor]:
        """Which keys some query sees, (B, H, Lk), and which queries see some key, (B, H, Lq)."""
        batch, heads, queries, keys = self.shape
        every = torch.ones(1, 1, 1, dtype=torch.bool, device=self.problem.sizes.device)
        spans = self.problem.spans
        found, some = (every, every) if spans is None else seen(spans, self.problem.sizes)
        return found.expand(batch, heads, keys), some.expand(batch, heads, queries)

    @cached_property
    def keys_seen(self) -> Tensor:
        """The keys that one of the `real` queries may see, bool (B, H, Lk)."""
        if bool(self.real.all()):
            return self.seen[0]
        batch, heads, queries, keys = self.shape
        start = torch.zeros(1, 1, 1, dtype=torch.int64, device=self.real.device)
        spans = self.problem.spans or Spans(start, start + keys)
        stop = spans.stop.expand(batch, heads, queries).where(self.real, 0)
        return seen(spans._replace(stop=stop), self.problem.sizes)[0].expand(batch, heads, keys)

    def only_padding(self, queries: Tensor) -> bool:
        """Whether these queries, bool (B, H, Lq), may be padding: no other query sees their keys.

        The key of a query has the same number, counted from the first key or from the last, since the slots of a cache
        come after these keys or before them. False where all queries of a sequence would be padding.
        """
        _, _, length, keys = self.shape
        whole = queries.any(-1) & (queries | ~self.real).all(-1)
        if length > keys or bool(whole.any()):
            return False
        ends = (self.keys_seen[..., :length], self.keys_seen[..., keys - length :])
        return any(not bool((queries & seen_keys).any()) for seen_keys in ends)

    @cached_property
    def rows(self) -> OfQueries:
        """Statistics of the softmax of every query, or, beyond `PAIRS` pairs, of evenly spaced queries."""
        queries = self.shape[2]
        step = max(1, math.ceil(math.prod(self.shape) / PAIRS))
        some = slice(0, queries, step)
        part = cut(self.problem, Region(queries=some))
        found = Weights(FromRecord(now(part), {})).reduce(Entropy(), MaxScore(), TopK(1), SinkShare())
        entropy, best, (weights, keys), sink = found
        shape = (*self.shape[:2], len(range(queries)[some]))
        entropy, best, weights, keys, sink = (t.reshape(shape) for t in (entropy, best, weights, keys, sink))
        counted = best.isfinite() & entropy.isfinite() & self.real[..., some]
        visible = (self.extent if step == 1 else extent(part)).allowed.expand(shape)
        return OfQueries(range(queries)[some], entropy, best, weights, keys, sink, visible, counted)

    @property
    def few_queries(self) -> slice:
        """At most `ROWS` evenly spaced queries, with at most `NUMBERS` scores in a sequence."""
        _, heads, queries, keys = self.shape
        rows = max(1, min(ROWS, NUMBERS // max(1, heads * keys * width(self.problem))))
        return slice(0, queries, math.ceil(queries / rows))

    @cached_property
    def spread(self) -> Tensor:
        """The standard deviation of the scores of a query over the keys it may see, before any bias, (B, H, n).

        For `few_queries`. NaN for a query that sees fewer than four keys, is padding, or is not
        finite.
        """
        some, found = self.few_queries, []
        for sequence in range(self.shape[0]):
            part = guard(cut(self.problem, Region(batch=slice(sequence, sequence + 1), queries=some)))
            raw, finished = tiles.raw_scores(part).double(), tiles.scores(part)
            hidden = finished == -torch.inf
            count = (~hidden).sum(-1)
            mean = raw.masked_fill(hidden, 0.0).sum(-1) / count
            off = (raw - mean.unsqueeze(-1)).masked_fill(hidden, 0.0)
            deviation = (off.square().sum(-1) / count).sqrt()
            usable = (count >= 4) & ~finished.isnan().any(-1) & self.real[sequence : sequence + 1, :, some]
            found.append(deviation.masked_fill(~usable, torch.nan))
        return torch.cat(found)


def first_place(which: Tensor) -> dict[str, int]:
    """The first True of a (B, H, L) tensor, in words for `Finding.where`."""
    places = zip(("sequence", "head", "query"), which.nonzero()[0].tolist(), which.shape, strict=True)
    return {name: place for name, place, size in places if size > 1 or name == "query"}


def by_head(values: Tensor, counted: Tensor) -> Tensor:
    """The mean of values (B, H, L) over the counted places, (H,), float64: NaN where a head has none."""
    return values.double().masked_fill(~counted, 0.0).sum((0, 2)) / counted.sum((0, 2))


def used(case: Case, name: str, tensor: Tensor) -> Tensor:
    """Which vectors of an input count: queries that see a key, keys (and values) that some query sees, (B, H, L)."""
    shape = tensor.shape[:-1]
    keys, queries = case.seen
    found = queries if name == "query" else group(keys, shape[1])
    for dim in (0, 1):  # one vector for a whole batch, or for all heads, counts where it counts for any of them
        if shape[dim] == 1 and found.shape[dim] > 1:
            found = found.any(dim, keepdim=True)
    return found.expand(shape)


class Check(ABC):
    """A search for one kind of fault in a call. The docstring of a subclass says by which number it judges, and why.

    `name`: the name of its findings.
    """

    name: ClassVar[str]

    @abstractmethod
    def find(self, case: Case) -> Findings:
        """The findings in this call."""

    def finding(self, severity: Severity, evidence: str, remedy: str, **where: Any) -> Finding:
        return Finding(self.name, severity, evidence, remedy, where)
