"""Attention of a sharded sequence: keys travel to the queries that need them, a rank at a time, their gradients back.

At step s each rank sends to rank + s what that one needs of its keys, and receives from rank − s, while it computes
with what came before. Queries stay. The parts are merged (`Partial`), and a part's gradients need no more than the rows
of the whole (`Rows`): so the backward pass fetches keys again, and sends dK and dV to their owners.
Sources: Liu et al. 2023, "Ring Attention"; Dao et al. 2022, "FlashAttention", appendix B.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.batched import Gradients
from clearhead.distributed import rows as messages
from clearhead.distributed.channel import Channel, Posted
from clearhead.distributed.needs import Job, Needs
from clearhead.distributed.once import gradients
from clearhead.engines.base import Engine
from clearhead.engines.choose import choose
from clearhead.problem import regions
from clearhead.problem.guard import guard
from clearhead.problem.packing import Operands, in_dtypes, operands, with_operands, without_operands
from clearhead.problem.partial import Partial, Rows, sinks_gradient
from clearhead.problem.problem import Problem
from clearhead.problem.region import EVERY, Region


class Shard(NamedTuple):
    """This rank's part of a problem: `local` has its own queries and keys, and of the whole mask and bias."""

    local: Problem
    needs: Needs
    channel: Channel

    @property
    def held(self) -> tuple[range, ...]:
        """The positions of this rank."""
        return self.needs.layout.own(self.channel.rank)

    def part(self, job: Job, query: Tensor, key: Tensor, value: Tensor | None) -> Problem:
        """The problem of a job, over these operands, which are its own."""
        local, sizes = self.local, self.needs.sizes
        nothing = local.query.new_empty(()).expand
        width, heads = local.query.shape[-1], local.key.shape[1]
        scores = local.scores._replace(
            query=nothing(sizes.batch, sizes.heads, sizes.queries, width),
            key=nothing(sizes.batch, heads, sizes.keys, local.key.shape[-1]),
        )
        queries, keys = (slice(side.start, side.stop) for side in job)
        spans = local.spans
        masked = spans is not None and (spans.residual is not None or not self.needs.full(job))
        whole = local._replace(scores=scores, value=None, sinks=None)
        cut = regions.cut(whole, Region(queries=queries, keys=keys, masked=masked))
        return cut._replace(scores=cut.scores._replace(query=query, key=key), value=value)


def engine_of(problem: Problem) -> Engine:
    """The engine of a part: one that gives the rows of its softmax."""
    return choose(problem._replace(value=None), None)


class _Attend(torch.autograd.Function):
    """The output (B, H, lq, Ev) of this rank's queries, in float32 at least."""

    @staticmethod
    def forward(ctx: Any, shard: Shard, *tensors: Tensor | None) -> Tensor:
        shard = shard._replace(local=with_operands(shard.local, tensors))
        found = _forward(shard)
        ctx.save_for_backward(*tensors, *found[:3])
        ctx.shard = shard._replace(local=without_operands(shard.local))
        ctx.reads = shard.local.reads()
        return found.output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.reads.check()
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad[1:]
        shard = ctx.shard._replace(local=with_operands(ctx.shard.local, saved[: len(wanted)]))

        def compute(grad: Tensor) -> Gradients:
            found = _backward(shard, Partial(*saved[len(wanted) :]), grad.contiguous(), wanted)
            return in_dtypes(found, operands(shard.local))

        return (None, *gradients(compute, (grad,), saved))


def attend(shard: Shard) -> Tensor:
    output: Tensor = _Attend.apply(shard, *operands(shard.local))  # type: ignore[no-untyped-call]
    return output


class _Piece(NamedTuple):
    """Some keys of one rank, with their values, and what is computed with them."""

    keys: range
    jobs: list[Job]
    of: list[Tensor]  # key and value


class _Turn(NamedTuple):
    """What this rank sends to one rank, and receives from another, at the same time; None where there is no more."""

    to: int
    given: range | None
    source: int
    taken: tuple[range, list[Job]] | None


def _turns(shard: Shard) -> list[_Turn]:
    """In the order in which every rank goes through them: each step has as many turns on all ranks.

    Two ranks exchange keys at one step and gradients at another, which only their order tells apart.
    """
    needs, me, ranks = shard.needs, shard.channel.rank, shard.channel.ranks
    found = []
    for step in range(1, ranks):
        to, source = (me + step) % ranks, (me - step) % ranks
        given, taken, every = (
            [keys for keys, _ in needs.pieces(to, me)],
            needs.pieces(me, source),
            range(needs.turns(step)),
        )
        found += [_Turn(to, out, source, into) for out, into, _ in itertools.zip_longest(given, taken, every)]
    return found


def _pieces(shard: Shard) -> Iterator[tuple[_Turn | None, _Piece | None]]:
    """Keys and values: those of this rank, then in each turn those that have come, while the next are under way."""
    local, channel = shard.local, shard.channel
    assert local.value is not None
    own = [local.key.contiguous(), local.value.contiguous()]
    for keys, jobs in shard.needs.pieces(channel.rank, channel.rank):
        yield None, _Piece(keys, jobs, _rows(own, shard, keys))
    turns = _turns(shard)

    def post(turn: _Turn) -> Posted:
        message = None if turn.given is None else messages.pack(own, shard.held, [turn.given])
        room = None if turn.taken is None else messages.room(own, [turn.taken[0]])
        return channel.post(turn.to, message, turn.source, room)

    posted = [post(turn) for turn in turns[:1]]
    for turn, later in itertools.zip_longest(turns, turns[1:]):
        received = posted.pop().wait()
        if later is not None:
            posted.append(post(later))
        if turn.taken is None or received is None:
            yield turn, None
        else:
            keys, jobs = turn.taken
            yield turn, _Piece(keys, jobs, messages.unpack(received, own, [keys]))


def _rows(of: list[Tensor], shard: Shard, keys: range) -> list[Tensor]:
    """The rows of these keys, of tensors that hold all of this rank's."""
    at = messages.place_of(keys, shard.held)
    return [t[:, :, at] for t in of]


def _parts(shard: Shard, piece: _Piece) -> Iterator[tuple[Job, slice, slice, Problem]]:
    """The jobs of a piece: the place of their queries among this rank's, of their keys in it, and the problem."""
    for job in piece.jobs:
        here, there = messages.place_of(job.queries, shard.held), messages.place_of(job.keys, [piece.keys])
        key, value = (t[:, :, there] for t in piece.of)
        yield job, here, there, shard.part(job, shard.local.query[:, :, here], key, value)


def _forward(shard: Shard) -> Partial:
    local = shard.local
    assert local.value is not None
    lead, dtype = local.query.shape[:3], accumulated(local.query.dtype)
    new = functools.partial(local.query.new_zeros, dtype=dtype)
    sums = Partial(new((*lead, local.value.shape[-1])), new(lead), new(lead).fill_(torch.inf))
    for _, piece in _pieces(shard):
        for _, here, _, problem in _parts(shard, piece) if piece else ():
            sums.add_(engine_of(problem).forward(problem, rows=True), (EVERY, EVERY, here))
    return sums if local.sinks is None else sums.with_sinks(local.sinks.to(dtype)[:, None])


def _backward(shard: Shard, kept: Partial, grad: Tensor, wanted: tuple[bool, ...]) -> Operands:
    """The gradients of this rank's operands; of what all ranks share (weight, bias, sinks) this rank's part."""
    local, channel = shard.local, shard.channel
    assert kept.maximum is not None and kept.log_sum is not None and local.value is not None
    rows = Rows(kept.maximum, kept.log_sum, (grad * kept.output).sum(-1))
    sums = Operands(*(None if t is None else torch.zeros_like(t, dtype=grad.dtype) for t in operands(local)))
    assert sums.key is not None and sums.value is not None
    own = [sums.key, sums.value]
    back: list[tuple[range | None, Posted]] = []

    def taken_back() -> None:
        for given, posted in back:
            received = posted.wait()
            if given is not None and received is not None:
                messages.add(own, shard.held, messages.unpack(received, own, [given]), [given])
        back.clear()

    for turn, piece in _pieces(shard):
        message = None
        if turn is None and piece is not None:  # this rank's own
            _add_gradients(shard, piece, (sums, _rows(own, shard, piece.keys)), rows, grad, wanted)
        elif piece is not None:
            message = grad.new_zeros(sum(t.numel() for t in piece.of))
            of_keys = messages.unpack(message, piece.of, [piece.keys])
            _add_gradients(shard, piece, (sums, of_keys), rows, grad, wanted)
        if turn is not None:
            taken_back()  # of the turn before
            room = None if turn.given is None else messages.room(own, [turn.given])
            back.append((turn.given, channel.post(turn.source, message, turn.to, room)))
    taken_back()
    if local.sinks is not None and wanted[-1]:
        sums = sums._replace(sinks=sinks_gradient(local.sinks, rows))
    return Operands(*(g if want else None for g, want in zip(sums, wanted, strict=True)))


def _add_gradients(
    shard: Shard,
    piece: _Piece,
    into: tuple[Operands, list[Tensor]],
    rows: Rows,
    grad: Tensor,
    wanted: tuple[bool, ...],
) -> None:
    """Adds the gradients of the parts of one piece: those of its key and value to a message, the others to the sums."""
    sums, of_keys = into
    assert sums.query is not None
    every = (True, True, True, *wanted[3:6], False)
    for job, here, there, problem in _parts(shard, piece):
        own = Rows(*(row[:, :, here] for row in rows))
        part = engine_of(problem).backward(guard(problem), own, grad[:, :, here], every)
        assert part.query is not None and part.key is not None and part.value is not None
        sums.query[:, :, here] += part.query
        of_keys[0][:, :, there] += part.key
        of_keys[1][:, :, there] += part.value
        _add_shared(sums, part, job, shard.needs)


def _add_shared(sums: Operands, part: Operands, job: Job, needs: Needs) -> None:
    """Adds a part's gradients of what is of the whole matrix: the weight of φ, and the bias."""
    if part.weight is not None and sums.weight is not None:
        sums.weight.add_(part.weight)
    if part.dense is not None and sums.dense is not None:
        queries, keys = (
            slice(None) if n == 1 else slice(s.start, s.stop) for n, s in zip(sums.dense.shape[2:], job, strict=True)
        )
        sums.dense[:, :, queries, keys] += part.dense
    if part.relative is not None and sums.relative is not None:
        first = needs.sizes.queries - job.queries.stop + job.keys.start
        sums.relative[..., first : first + part.relative.shape[-1]] += part.relative
