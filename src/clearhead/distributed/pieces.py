"""Keys that travel to the queries that need them, a rank at a time, and what is sent back to their owners.

At step s each rank sends to rank + s what that one needs of its keys, and receives from rank − s, while it computes
with what came before. Queries stay.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from clearhead.distributed import rows as messages
from clearhead.distributed.channel import Channel, Posted
from clearhead.distributed.needs import Job, Needs
from clearhead.engines.base import Engine
from clearhead.engines.choose import choose
from clearhead.problem import regions
from clearhead.problem.problem import Problem
from clearhead.problem.region import Region


class Shard(NamedTuple):
    """This rank's part of a problem: `local` has its own queries and keys, and of the whole mask and bias."""

    local: Problem
    needs: Needs
    channel: Channel

    @property
    def held(self) -> tuple[range, ...]:
        """The positions of this rank."""
        return self.needs.layout.own(self.channel.rank)

    @property
    def whole(self) -> Problem:
        """The whole problem in its sizes, mask and bias; its queries and keys are no numbers that mean anything."""
        local, sizes = self.local, self.needs.sizes
        nothing = local.query.new_empty(()).expand
        scores = local.scores._replace(
            query=nothing(sizes.batch, sizes.heads, sizes.queries, local.query.shape[-1]),
            key=nothing(sizes.batch, local.key.shape[1], sizes.keys, local.key.shape[-1]),
        )
        return local._replace(scores=scores, value=None)

    def part(self, job: Job, query: Tensor, key: Tensor, value: Tensor | None) -> Problem:
        """The problem of a job, over these operands, which are its own; without sinks, which enter once."""
        queries, keys = (slice(side.start, side.stop) for side in job)
        spans = self.local.spans
        masked = spans is not None and (spans.residual is not None or not self.needs.full(job))
        whole = self.whole._replace(sinks=None)
        cut = regions.cut(whole, Region(queries=queries, keys=keys, masked=masked))
        return cut._replace(scores=cut.scores._replace(query=query, key=key), value=value)


def engine_of(problem: Problem) -> Engine:
    """The engine of a part: one that gives the rows of its softmax."""
    return choose(problem._replace(value=None), None)


class Piece(NamedTuple):
    """Some keys of one rank, with their values where these are there, and what is computed with them."""

    keys: range
    jobs: list[Job]
    of: list[Tensor]  # key, and value


class Turn(NamedTuple):
    """What this rank sends to one rank, and receives from another, at the same time; None where there is nothing."""

    to: int
    given: range | None
    source: int
    taken: tuple[range, list[Job]] | None


def pieces(shard: Shard) -> Iterator[tuple[Turn | None, Piece | None]]:
    """Keys and values: those of this rank, then in each turn those that have come, while the next are under way."""
    local, channel = shard.local, shard.channel
    own = [t.contiguous() for t in (local.key, local.value) if t is not None]
    for keys, jobs in shard.needs.pieces(channel.rank, channel.rank):
        yield None, Piece(keys, jobs, _rows(own, shard, keys))
    turns = _turns(shard)

    def post(turn: Turn) -> Posted:
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
            yield turn, Piece(keys, jobs, messages.unpack(received, own, [keys]))


def sent_back(shard: Shard, sums: list[Tensor], add: Callable[[Piece, list[Tensor]], None]) -> None:
    """Goes through all pieces: what `add` adds to rows of a piece's keys reaches the `sums` of the rank that has them.

    `sums`: (B, any heads, l, any width), the rows of this rank's keys.
    """
    back: list[tuple[range | None, Posted]] = []

    def taken_back() -> None:
        for given, posted in back:
            received = posted.wait()
            if given is not None and received is not None:
                messages.add(sums, shard.held, messages.unpack(received, sums, [given]), [given])
        back.clear()

    for turn, piece in pieces(shard):
        message = None
        if turn is None and piece is not None:  # this rank's own
            add(piece, _rows(sums, shard, piece.keys))
        elif piece is not None:
            message = messages.room(sums, [piece.keys])
            assert message is not None
            add(piece, messages.unpack(message.zero_(), sums, [piece.keys]))
        if turn is not None:
            taken_back()  # of the turn before
            room = None if turn.given is None else messages.room(sums, [turn.given])
            back.append((turn.given, shard.channel.post(turn.source, message, turn.to, room)))
    taken_back()


def parts(shard: Shard, piece: Piece) -> Iterator[tuple[Job, slice, slice, Problem]]:
    """The jobs of a piece: the place of their queries among this rank's, of their keys in it, and the problem."""
    for job in piece.jobs:
        here, there = messages.place_of(job.queries, shard.held), messages.place_of(job.keys, [piece.keys])
        key, *value = (t[:, :, there] for t in piece.of)
        yield job, here, there, shard.part(job, shard.local.query[:, :, here], key, value[0] if value else None)


def _turns(shard: Shard) -> list[Turn]:
    """In the order in which every rank goes through them.

    All ranks have as many in each step, though some have nothing to send or receive in the last of them: two peers
    send each other keys in one step and what is sent back in another, and messages are matched by their order alone.
    """
    needs, me, ranks = shard.needs, shard.channel.rank, shard.channel.ranks
    found = []
    for step in range(1, ranks):
        to, source = (me + step) % ranks, (me - step) % ranks
        given, taken = (keys for keys, _ in needs.pieces(to, me)), needs.pieces(me, source)
        every = range(max(needs.messages((rank + step) % ranks, rank) for rank in range(ranks)))
        each = itertools.zip_longest(given, taken, every)
        found += [Turn(to, out, source, into) for out, into, _ in each]
    return found


def _rows(of: list[Tensor], shard: Shard, keys: range) -> list[Tensor]:
    """The rows of these keys, of tensors that hold all of this rank's."""
    at = messages.place_of(keys, shard.held)
    return [t[:, :, at] for t in of]
