"""Sums and maxima over queries, of weights whose softmax is known: received weights of keys, and maps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.distributed.needs import Job, both
from clearhead.distributed.pieces import Piece, Shard, engine_of, parts, sent_back
from clearhead.engines.tiled.statistics import pooled
from clearhead.engines.tiled.tiles import weights_in
from clearhead.problem.guard import guard
from clearhead.problem.partial import Rows
from clearhead.problem.problem import Problem
from clearhead.problem.region import Region
from clearhead.problem.regions import cut
from clearhead.problem.summary import Found, Sent, Summary


class OverQueries(NamedTuple):
    """A summary of the weights of the queries `queries`, with the maxima and log-sums of this rank's queries."""

    summary: Summary
    queries: range
    maximum: Tensor
    log_sum: Tensor

    def part(self, problem: Problem, job: Job, here: slice) -> tuple[Problem, Job, Rows] | None:
        """The guarded problem of a job cut to these queries, with their rows; None where the job has none of them."""
        queries = both(job.queries, self.queries)
        if not queries:
            return None
        first = queries.start - job.queries.start
        own = slice(here.start + first, here.start + first + len(queries))
        maximum, log_sum = (row[:, :, own] for row in (self.maximum, self.log_sum))
        problem = guard(cut(problem, Region(queries=slice(first, first + len(queries)))))
        return problem, job._replace(queries=queries), Rows(maximum, log_sum, torch.zeros_like(log_sum))

    def factors(self, queries: range) -> Tensor | None:
        """The factor of each of these queries; None where all factors are 1."""
        every = self.summary.factors
        return None if every is None else every[..., queries.start - self.queries.start :][..., : len(queries)]


def over_queries(shard: Shard, wanted: list[OverQueries]) -> list[Found]:
    """The statistics of each summary: `received` for this rank's keys; `mean` and `peak` for the whole sequence. `mean`
    and `peak` are the same to the bit on every rank."""
    if not wanted:
        return []
    local, sizes = shard.local, shard.needs.sizes
    dtype = accumulated(local.query.dtype)
    received = local.query.new_zeros((sizes.batch, sizes.heads, local.key.shape[2], len(wanted)), dtype=dtype)
    means = [_map(one.summary.mean, one, shard, dtype) for one in wanted]
    peaks = [_map(one.summary.peak, one, shard, dtype) for one in wanted]

    def add(piece: Piece, of_keys: list[Tensor]) -> None:
        for job, here, there, problem in parts(shard, piece):
            for at, one in enumerate(wanted):
                part = one.part(problem._replace(value=None), job, here)
                if part is None:
                    continue
                if one.summary.received:
                    of_keys[0][:, :, there, at] += _received(one, *part)
                _add_to_maps(means[at], peaks[at], one, *part)

    sent_back(shard, [received], add)
    return [
        Found(
            received=received[..., at] if one.summary.received else None,
            mean=None if mean is None else shard.channel.gather(mean).sum(0),
            peak=None if peak is None else shard.channel.gather(peak).amax(0),
        )
        for at, (one, mean, peak) in enumerate(zip(wanted, means, peaks, strict=True))
    ]


def _received(one: OverQueries, problem: Problem, job: Job, rows: Rows) -> Tensor:
    """Σ_i factor_i w_ij over the queries i of a part."""
    sizes = problem.sizes
    ones = rows.log_sum.new_ones(sizes.batch, sizes.heads, sizes.keys)
    sent = Sent(received=ones, factors=one.factors(job.queries))
    return engine_of(problem).contributions(problem, rows, None, sent, by_key=True)


def _map(cell: tuple[int, int] | None, one: OverQueries, shard: Shard, dtype: torch.dtype) -> Tensor | None:
    """Room for a map of the whole sequence; None where no map is wanted."""
    if cell is None:
        return None
    sizes = shard.needs.sizes
    rows, columns = -(-len(one.queries) // cell[0]), -(-sizes.keys // cell[1])
    return shard.local.query.new_zeros((sizes.batch, sizes.heads, rows, columns), dtype=dtype)


def _add_to_maps(
    mean: Tensor | None, peak: Tensor | None, one: OverQueries, problem: Problem, job: Job, rows: Rows
) -> None:
    if mean is None and peak is None:
        return
    engine, factors = engine_of(problem), one.factors(job.queries)
    for region in engine.walk(problem):
        at = region.sides[:3]
        weights = weights_in(engine.scores(cut(problem, region)), rows.maximum[at], rows.log_sum[at])
        first = (
            job.queries.start - one.queries.start + (region.queries.start or 0),
            job.keys.start + (region.keys.start or 0),
        )
        if peak is not None and one.summary.peak:
            part, place = _place(peak, weights, at, first, one.summary.peak, torch.amax)
            place.copy_(torch.maximum(place, part))
        if mean is not None and one.summary.mean:
            if factors is not None:
                own = (side if n > 1 else slice(None) for side, n in zip(at, factors.shape, strict=True))
                weights *= factors[tuple(own)].to(weights.dtype).unsqueeze(-1)
            part, place = _place(mean, weights, at, first, one.summary.mean, torch.sum)
            place += part


def _place(
    into: Tensor, weights: Tensor, at: tuple[slice, ...], first: tuple[int, int], cell: tuple[int, int], reduce: Any
) -> tuple[Tensor, Tensor]:
    """The cells of `weights`, whose first query and key are `first`, and the place of these cells in the map `into`."""
    part = pooled(weights, first, cell, reduce)
    sides = (slice(a // n, a // n + size) for a, n, size in zip(first, cell, part.shape[2:], strict=True))
    return part, into[(*at[:2], *sides)]
