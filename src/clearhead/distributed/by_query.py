"""Statistics of each query's softmax, merged over parts of the keys in one pass, as `Partial` merges outputs."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.distributed.needs import Job
from clearhead.distributed.pieces import Shard, engine_of, parts, pieces
from clearhead.engines.summarised import summarised
from clearhead.problem.partial import Partial
from clearhead.problem.problem import Problem
from clearhead.problem.region import EVERY
from clearhead.problem.summary import Found, Summary


class ByQuery:
    """The statistics of a summary for this rank's queries, over the parts of the keys that were added so far.

    Averages by weight (output, groups, distance) are merged as outputs are. The entropy of two parts together is
    Σ_p a_p (H_p − log a_p), where a_p is the share of part p in the softmax. The largest weights are ordered by their
    scores; of equal scores the first key is taken. Equal keys in parts of different sizes may have scores that differ
    in the last bit.
    """

    def __init__(self, local: Problem, summary: Summary) -> None:
        lead, dtype = local.query.shape[:3], accumulated(local.query.dtype)
        new = functools.partial(local.query.new_zeros, dtype=dtype)
        self.summary, self._keys = summary._replace(rows=True, scores=bool(summary.top)), local.sizes.keys
        of_value = 0 if local.value is None or not summary.output else local.value.shape[-1]
        of_groups = 0 if summary.groups is None else summary.groups.shape[-1]
        self._widths = [of_value, of_groups, int(summary.distance is not None)]
        self._rows = Partial(new((*lead, sum(self._widths))), new(lead), new(lead).fill_(torch.inf))
        self._entropy = new(lead)
        self._best, self._best_key = new(lead).fill_(-torch.inf), new(lead).long().fill_(-1)
        self._scores = new((*lead, summary.top)).fill_(-torch.inf)
        self._indices = self._scores.long().fill_(-1)

    def of_part(self, job: Job) -> Summary:
        """The summary to compute for the part of a job."""
        own = self.summary
        queries, keys = (slice(side.start, side.stop) for side in job)
        return own._replace(
            groups=None if own.groups is None else own.groups[:, keys],
            distance=None if own.distance is None else own.distance[..., queries] - keys.start,
            top=min(own.top, len(job.keys)),
        )

    def add(self, found: Found, here: slice, first: int) -> None:
        """Add the statistics of a part: its queries are `here`, and its keys begin at `first`."""
        at = (EVERY, EVERY, here)
        mine = self._rows.at(here)
        assert found.maximum is not None
        averages = [found.output, found.groups, None if found.distance is None else found.distance.unsqueeze(-1)]
        none = found.maximum.new_zeros(*found.maximum.shape, 0)
        part = Partial(torch.cat([none, *(t for t in averages if t is not None)], -1), found.maximum, found.log_sum)
        if found.entropy is not None:
            both = zip((self._entropy[at], found.entropy), mine.shares(part)[2], strict=True)
            self._entropy[at] = sum(share * entropy - torch.xlogy(share, share) for entropy, share in both)
        mine.add_(part)
        if found.best is not None and found.best_key is not None:
            before, before_key, key = self._best[at], self._best_key[at], found.best_key + first
            first_of_equal = (found.best == before) & (key < before_key)
            more = (found.best > before) | first_of_equal | found.best.isnan()
            self._best[at] = torch.where(more, found.best, before)
            self._best_key[at] = torch.where(more, key, before_key)
        if found.scores is not None and found.indices is not None:
            self._take(at, found.scores, found.indices + first)

    def _take(self, at: tuple[slice, ...], scores: Tensor, indices: Tensor) -> None:
        """Keep the largest of the old and the new scores; equal scores stay in the order of their keys."""
        every, keys = torch.cat([self._scores[at], scores], -1), torch.cat([self._indices[at], indices], -1)
        keys, order = keys.sort(-1)
        every, by_score = every.gather(-1, order).sort(dim=-1, descending=True, stable=True)
        k = self.summary.top
        self._scores[at], self._indices[at] = every[..., :k], keys.gather(-1, by_score)[..., :k]

    def found(self, sinks: Tensor | None) -> Found:
        """The statistics. With sinks, statistics of the weights are reduced by the share of the sinks."""
        rows = self._rows if sinks is None else self._rows.with_sinks(sinks.to(self._entropy.dtype)[:, None])
        output, groups, distance = torch.split(rows.output, self._widths, -1)
        assert rows.maximum is not None and rows.log_sum is not None
        own = self.summary
        return Found(
            output=output if own.output else None,
            groups=None if own.groups is None else groups,
            maximum=rows.maximum,
            log_sum=rows.log_sum,
            entropy=self._entropy if own.entropy else None,
            distance=None if own.distance is None else distance.squeeze(-1),
            best=self._best if own.best else None,
            best_key=self._best_key if own.best else None,
            values=(self._scores - rows.maximum.unsqueeze(-1) - rows.log_sum.unsqueeze(-1)).exp() if own.top else None,
            indices=self._filled() if own.top else None,
            scores=self._scores if own.top else None,
        )

    def _filled(self) -> Tensor:
        """The keys of the largest weights, filled up with other keys where a query sees fewer than k."""
        none, k = self._scores == -torch.inf, self.summary.top
        if not none.any():
            return self._indices
        some = min(k, self._keys)  # enough of the first k keys are free
        taken = none.new_zeros((*none.shape[:-1], some + 1), dtype=torch.int8)
        taken.scatter_(-1, self._indices.masked_fill(none, some).clamp(max=some), 1)
        free = taken[..., :some].sort(dim=-1, stable=True).indices  # the free keys come first
        return torch.where(none, free.gather(-1, (none.cumsum(-1) - 1).clamp(min=0)), self._indices)


def by_query(shard: Shard, summaries: list[Summary]) -> list[ByQuery]:
    """The statistics of each summary for this rank's queries. Every rank calls this with equally many summaries."""
    every = [ByQuery(shard.local, summary) for summary in summaries]
    for _, piece in pieces(shard):
        for job, here, _, problem in parts(shard, piece) if piece else ():
            for one in every:
                meant = problem if one.summary.output else problem._replace(value=None)
                one.add(summarised(meant, engine_of(meant), one.of_part(job)), here, job.keys.start)
    return every
