"""This rank's part of a problem, the exchange of keys between ranks, and the sums that are sent back to their owners.

At step s each rank sends to rank + s the keys that rank + s needs, and receives keys from rank − s, while it computes
with the keys that it received before. Queries are not sent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.base.errors import ShapeError
from clearhead.base.shapes import Sizes
from clearhead.base.torch_state.mode import CURRENT
from clearhead.base.torch_state.tensor_kind import is_on_host
from clearhead.distributed.channel import Channel, Posted
from clearhead.distributed.layout import Layout
from clearhead.distributed.needs import Job, Needs
from clearhead.engines.base import Engine
from clearhead.engines.choose import choose
from clearhead.masks.base import Mask
from clearhead.problem import regions
from clearhead.problem.arguments import as_score, as_sinks
from clearhead.problem.problem import ABSENT, Problem, inputs, make_problem, mask_and_bias, refuse_distributed
from clearhead.problem.region import Region
from clearhead.problem.unseen import finite, group, seen, zero
from clearhead.problem.visible import Visible
from clearhead.scores.change_in_documents import count_in_documents


class Shard(NamedTuple):
    """This rank's part of a problem: `local` has the queries and keys of this rank, and mask and bias of the whole."""

    local: Problem
    needs: Needs
    channel: Channel

    @classmethod
    def from_problem(cls, local: Problem, layout: Layout) -> Shard:
        """The shard of this rank's problem."""
        return cls(local, Needs(layout, local.visible, local.sizes), Channel(layout.group))

    @property
    def held(self) -> tuple[range, ...]:
        """The positions of this rank."""
        return self.needs.layout.own(self.channel.rank)

    @property
    def whole(self) -> Problem:
        """The whole problem with its sizes, mask and bias. Its queries and keys are placeholders without meaning."""
        local, sizes = self.local, self.needs.sizes
        nothing = local.query.new_empty(()).expand
        scores = local.scores._replace(
            query=nothing(sizes.batch, sizes.heads, sizes.queries, local.query.shape[-1]),
            key=nothing(sizes.batch, local.key.shape[1], sizes.keys, local.key.shape[-1]),
        )
        return local._replace(scores=scores, value=None)

    def part(self, job: Job, query: Tensor, key: Tensor, value: Tensor | None) -> Problem:
        """The problem of a job over the operands of the job; without sinks, which enter only once."""
        queries, keys = (slice(side.start, side.stop) for side in job)
        spans = self.local.spans
        masked = spans is not None and (spans.residual is not None or not self.needs.full(job))
        if spans is not None and not masked:  # under a mask, NaN and ∞ in a key give NaN: see `guard`
            masked = any(is_on_host(t) and not finite(t) for t in (key, value) if t is not None)
        whole = self.whole._replace(sinks=None)
        cut = regions.cut(whole, Region(queries=queries, keys=keys, masked=masked))
        return cut._replace(scores=cut.scores._replace(query=query, key=key), value=value)


def sharded(
    query: Tensor, key: Tensor, value: Any, layout: Layout, *, mask: Any, bias: Any, sinks: Any, **of_score: Any
) -> Problem:
    """The problem of this rank's operands, with the sizes, the mask and the bias of the whole sequence."""
    refuse_distributed({"query": query, "key": key, "value": value})
    if isinstance(mask, Mask) and mask._document_edges is not None:
        of_score["score"] = count_in_documents(as_score(of_score["score"]), mask._document_edges)
    problem = make_problem(query, key, value, **of_score)
    held, given = layout.held, (problem.sizes.queries, problem.sizes.keys)
    if given != (held, held):
        raise ShapeError(
            f"query has {given[0]} positions and key {given[1]}, and rank {layout.rank} holds {held} of {layout}: pass "
            "layout.shard(tensor, dim) of each."
        )
    sizes = problem.sizes._replace(queries=layout.length, keys=layout.length)
    if sizes.device.type == "meta":  # only shapes were passed; masks are read on the CPU
        sizes = sizes._replace(device=torch.device("cpu"))
    visible, added = mask_and_bias(mask, bias, sizes, problem.query.dtype)
    unseen = visible is not None and visible.unseen != "none" and not problem.mode.compiled
    if visible is not None and unseen and not (finite(problem.query) and finite(problem.key)):
        problem = make_problem(*_without_unseen(query, key, value, visible, sizes, layout), **of_score)
    sinks = None if sinks is None else as_sinks(sinks, sizes)
    return problem._replace(sizes=sizes, visible=visible, bias=added, sinks=sinks)


def _without_unseen(
    query: Any, key: Any, value: Any, visible: Visible, sizes: Sizes, layout: Layout
) -> tuple[Tensor, Tensor, Any]:
    """The inputs with zeros in place of numbers that are not finite, in rows that are seen on no rank. Otherwise the
    gradient of a projection would become NaN."""
    query, key, value, _ = inputs(query, key, value, CURRENT)
    keys, queries = seen(visible.spans, sizes)
    keys, queries = (t if t.shape[2] != layout.length else layout.shard(t, 2) for t in (keys, queries))
    key = zero(key, group(keys, key.shape[1]), only_not_finite=True)
    return zero(query, queries, only_not_finite=True), key, ABSENT if value is None else value


def share_seed(shard: Shard) -> Shard:
    """The shard with the dropout seed that the first rank has drawn."""
    seed = shard.local.seed
    if seed is None:
        return shard
    first = shard.channel.gather(seed.reshape(1))[0].reshape(())
    return shard._replace(local=shard.local._replace(seed=first))


def engine_of(problem: Problem) -> Engine:
    """The engine of a part, which gives the rows of its softmax."""
    return choose(problem._replace(value=None), None)


class Piece(NamedTuple):
    """Some keys of one rank, with their values where there are values, and the jobs that use them."""

    keys: range
    jobs: list[Job]
    of: list[Tensor]  # key, and value


class Turn(NamedTuple):
    """The keys that this rank sends to one rank and those that it receives from another, at the same time.

    Each is None where nothing is left to send or to receive.
    """

    to: int
    given: range | None
    source: int
    taken: tuple[range, list[Job]] | None


def pieces(shard: Shard) -> Iterator[tuple[Turn | None, Piece | None]]:
    """All pieces of keys and values: first this rank's own, then in each turn the received piece.

    The next message is under way while a piece is used. The turn is None for this rank's own keys; the piece is None
    where nothing was received.
    """
    local, channel = shard.local, shard.channel
    own = [t.contiguous() for t in (local.key, local.value) if t is not None]
    for keys, jobs in shard.needs.pieces(channel.rank, channel.rank):
        yield None, Piece(keys, jobs, _rows(own, shard, keys))
    turns = _turns(shard)

    def post(turn: Turn) -> Posted:
        message = None
        if turn.given is not None:
            message = torch.cat([t.reshape(-1) for t in _rows(own, shard, turn.given)])
        room = None if turn.taken is None else _room(own, turn.taken[0])
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
            yield turn, Piece(keys, jobs, _unpack(received, own, keys))


def sent_back(shard: Shard, sums: list[Tensor], add: Callable[[Piece, list[Tensor]], None]) -> None:
    """Call `add` for every piece, and send the sums for its keys to the rank that holds these keys.

    `add(piece, of_keys)` adds to `of_keys`, the rows of the piece's keys. `sums`: (B, any heads, l, any width), the
    rows of this rank's keys, to which the results of all ranks are added.
    """
    back: list[tuple[range | None, Posted]] = []

    def taken_back() -> None:
        for given, posted in back:
            received = posted.wait()
            if given is not None and received is not None:
                for total, part in zip(_rows(sums, shard, given), _unpack(received, sums, given), strict=True):
                    total += part
        back.clear()

    for turn, piece in pieces(shard):
        message = None
        if turn is None and piece is not None:  # keys of this rank
            add(piece, _rows(sums, shard, piece.keys))
        elif piece is not None:
            message = _room(sums, piece.keys).zero_()
            add(piece, _unpack(message, sums, piece.keys))
        if turn is not None:
            taken_back()  # the sums of the turn before
            room = None if turn.given is None else _room(sums, turn.given)
            back.append((turn.given, shard.channel.post(turn.source, message, turn.to, room)))
    taken_back()


def parts(shard: Shard, piece: Piece) -> Iterator[tuple[Job, slice, slice, Problem]]:
    """The jobs of a piece, with the places of their queries on this rank and of their keys in it, and their problem."""
    if not shard.local.query.shape[0] or not shard.local.query.shape[1]:  # no sequence or no head: no pairs
        return
    for job in piece.jobs:
        here, there = place_of(job.queries, shard.held), place_of(job.keys, [piece.keys])
        key, *value = (t[:, :, there] for t in piece.of)
        yield job, here, there, shard.part(job, shard.local.query[:, :, here], key, value[0] if value else None)


def _turns(shard: Shard) -> list[Turn]:
    """All turns, in the order in which every rank takes them.

    In each step all ranks take equally many turns, even with nothing to send: messages between two ranks are matched by
    their order, and keys and gradients of different steps are sent between the same two ranks.
    """
    needs, me, ranks = shard.needs, shard.channel.rank, shard.channel.ranks
    found = []
    for step in range(1, ranks):
        to, source = (me + step) % ranks, (me - step) % ranks
        given, taken = iter([keys for keys, _ in needs.pieces(to, me)]), iter(needs.pieces(me, source))
        found += [Turn(to, next(given, None), source, next(taken, None)) for _ in range(needs.turns(step))]
    return found


def _rows(of: list[Tensor], shard: Shard, keys: range) -> list[Tensor]:
    """The rows of these keys in tensors that hold all keys of this rank."""
    at = place_of(keys, shard.held)
    return [t[:, :, at] for t in of]


def _room(like: list[Tensor], keys: range) -> Tensor:
    """The room for a message: the rows of these keys, of all the tensors."""
    return like[0].new_empty(sum(t.shape[0] * t.shape[1] * t.shape[3] for t in like) * len(keys))


def _unpack(message: Tensor, like: list[Tensor], keys: range) -> list[Tensor]:
    """The tensors (B, H, rows, E) in a message with the rows of these keys."""
    shapes = [(*t.shape[:2], len(keys), t.shape[3]) for t in like]
    parts = torch.split(message, [math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def place_of(part: range, runs: Sequence[range]) -> slice:
    """The place of a part of one run among the rows of all runs, which are laid one after another."""
    first = 0
    for run in runs:
        if run.start <= part.start and part.stop <= run.stop:
            return slice(first + part.start - run.start, first + part.stop - run.start)
        first += len(run)
    raise AssertionError(f"{part} is in no run of {runs}")
