"""Which keys each rank needs from each other rank, and which parts of the matrix it computes with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from clearhead.base.shapes import Sizes
from clearhead.distributed.layout import Layout
from clearhead.problem.visible import Visible, intervals_of

PIECE = 1024  # keys in one message of the exchange: smaller messages need less memory, and more calls of a kernel
NEAR = 64  # a gap of at most so many unseen keys between seen keys is sent with them; a longer gap is left out


class Job(NamedTuple):
    """A part of the matrix that one rank computes: positions in the whole sequence."""

    queries: range
    keys: range


class Needs:
    """The plan of all ranks: `runs[r][p]`, the keys of rank p that rank r needs, and `jobs[r][p]`, its jobs with them.

    Every rank makes the same plan, since the plan follows from the layout and the mask alone.
    """

    def __init__(self, layout: Layout, visible: Visible | None, sizes: Sizes) -> None:
        self.layout, self.sizes = layout, sizes
        self.intervals = None if visible is None else np.broadcast_arrays(*intervals_of(visible))
        ranks = range(layout.ranks)
        seen = [[(chunk, self._seen(chunk)) for chunk in layout.own(rank)] for rank in ranks]
        self.jobs = [[list(_jobs(seen[r], layout.own(p))) for p in ranks] for r in ranks]
        self.runs = [[_joined([job.keys for job in self.jobs[r][p]], 0) for p in ranks] for r in ranks]

    def _seen(self, queries: range) -> list[range]:
        """The keys that the intervals let some of these queries see, as few ascending runs. Residuals are not read."""
        if self.intervals is None:
            return [range(self.sizes.keys)] if self.sizes.keys else []
        start, stop = _edges_of(queries, self.intervals)
        some = stop > start
        if not some.any():
            return []
        first, last = start[some], stop[some]
        order = np.argsort(first)
        first, last = first[order], np.maximum.accumulate(last[order])
        apart = first[1:] > last[:-1]
        begins, ends = first[np.concatenate([[True], apart])], last[np.concatenate([apart, [True]])]
        return _joined([range(int(a), int(b)) for a, b in zip(begins, ends, strict=True)], NEAR)

    def pairs(self, job: Job) -> int:
        """The pairs of a job that the mask's intervals allow, in all sequences and heads."""
        sizes = self.sizes
        if self.intervals is None:
            return sizes.batch * sizes.heads * len(job.queries) * len(job.keys)
        start, stop = _edges_of(job.queries, self.intervals)
        inside = np.minimum(stop, job.keys.stop) - np.maximum(start, job.keys.start)
        count = int(np.maximum(inside, 0).sum())
        for here, all_of in zip(start.shape[:3], (sizes.batch, sizes.heads, len(job.queries)), strict=True):
            count *= all_of if here == 1 else 1
        return count

    def full(self, job: Job) -> bool:
        """Whether the intervals allow every pair of a job."""
        return self.pairs(job) == self.sizes.batch * self.sizes.heads * len(job.queries) * len(job.keys)

    def pieces(self, rank: int, peer: int) -> list[tuple[range, list[Job]]]:
        """The keys of a peer that a rank needs, in pieces, each with its jobs. A rank's own keys are not sent."""
        jobs, found = self.jobs[rank][peer], []
        for run in self.runs[rank][peer]:
            step = self._piece(rank, peer)
            for first in range(run.start, run.stop, step):
                piece = range(first, min(first + step, run.stop))
                inside = (self._narrowed(Job(job.queries, both(job.keys, piece))) for job in jobs)
                found.append((piece, [job for job in inside if len(job.keys) and len(job.queries)]))
        return found

    def turns(self, step: int) -> int:
        """The largest number of pieces that any rank needs from the rank `step` before it."""
        ranks = self.layout.ranks
        pairs = ((rank, (rank - step) % ranks) for rank in range(ranks))
        return max(self._count(rank, peer, self._piece(rank, peer)) for rank, peer in pairs)

    def _piece(self, rank: int, peer: int) -> int:
        """The keys in a piece. In one step the pieces of all ranks are about equally large, so no rank waits long."""
        keys = self.rows[rank][peer]
        if rank == peer or not keys:
            return keys
        even = -(-keys // self._most[(rank - peer) % self.layout.ranks])
        return max(even, PIECE // 4)  # a smaller piece is not worth a message and a call of a kernel

    @cached_property
    def _most(self) -> list[int]:
        """For each step, the largest number of pieces of at most `PIECE` keys that a rank needs in it."""
        every = range(self.layout.ranks)
        return [max(self._count(rank, rank - step, PIECE) for rank in every) for step in every]

    def _count(self, rank: int, peer: int, size: int) -> int:
        return sum(-(-len(run) // size) for run in self.runs[rank][peer])

    def _narrowed(self, job: Job) -> Job:
        """The job without the queries at its ends that see none of its keys."""
        if self._hulls is None or not len(job.keys):
            return job
        low, high = (edge[job.queries.start : job.queries.stop] for edge in self._hulls)
        some = np.flatnonzero((low < job.keys.stop) & (high > job.keys.start))
        if not len(some):
            return job._replace(queries=range(0))
        first = job.queries.start
        return job._replace(queries=range(first + int(some[0]), first + int(some[-1]) + 1))

    @cached_property
    def _hulls(self) -> tuple[np.ndarray, np.ndarray] | None:
        """For each query the first key that it may see in some sequence or head, and one past the last such key."""
        if self.intervals is None or self.intervals[0].shape[2] == 1:  # all queries alike
            return None
        start, stop = self.intervals
        none = stop <= start
        return np.where(none, self.sizes.keys, start).min((0, 1, 3)), np.where(none, 0, stop).max((0, 1, 3))

    @cached_property
    def rows(self) -> list[list[int]]:
        """How many keys rank r needs of rank p."""
        return [[sum(map(len, runs)) for runs in each] for each in self.runs]


def _edges_of(queries: range, edges: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The edges of the intervals of these queries; edges of one row are those of all queries."""
    return [edge if edge.shape[2] == 1 else edge[:, :, queries.start : queries.stop] for edge in edges]


def _jobs(seen: list[tuple[range, list[range]]], held: tuple[range, ...]) -> Iterator[Job]:
    for queries, runs in seen:
        for chunk in held:
            for run in runs:
                keys = both(run, chunk)
                if len(keys):
                    yield Job(queries, keys)


def both(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _joined(runs: list[range], near: int) -> list[range]:
    """The runs in ascending order. Runs that overlap, or have at most `near` keys between them, become one. With
    `near=0`, runs that only touch stay apart."""
    found: list[range] = []
    for run in sorted(runs, key=lambda r: (r.start, r.stop)):
        if found and (run.start < found[-1].stop or (near and run.start <= found[-1].stop + near)):
            found[-1] = range(found[-1].start, max(found[-1].stop, run.stop))
        else:
            found.append(run)
    return found
