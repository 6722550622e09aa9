"""Attention of a sharded sequence: keys travel to the queries that need them, a rank at a time, their gradients back.

At step s each rank sends to rank + s what that one needs of its keys, and receives from rank − s, while it computes
with what came before. Queries stay. The parts are merged (`Partial`), and a part's gradients need no more than the rows
of the whole (`Rows`): so the backward pass fetches keys again, and sends dK and dV to their owners.
Sources: Liu et al. 2023, "Ring Attention"; Dao et al. 2022, "FlashAttention", appendix B.
"""

from __future__ import annotations

import functools
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
from clearhead.problem.region import Region


class Shard(NamedTuple):
    """This rank's part of a problem: `local` has its own queries and keys, and of the whole mask and bias."""

    local: Problem
    needs: Needs
    channel: Channel

    @property
    def held(self) -> tuple[range, ...]:
        """The keys of this rank."""
        return self.needs.keys.own(self.channel.rank)

    @property
    def asked(self) -> tuple[range, ...]:
        """The queries of this rank."""
        return self.needs.queries.own(self.channel.rank)

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


def _keys(shard: Shard) -> Iterator[tuple[int, tuple[range, ...] | list[range], list[Tensor]]]:
    """For one rank after another, this one first: its number, the runs of its keys that are needed, key and value."""
    needs, channel = shard.needs, shard.channel
    me, ranks = channel.rank, channel.ranks
    key, value = shard.local.key.contiguous(), shard.local.value
    assert value is not None
    own = [key, value.contiguous()]

    def post(step: int) -> Posted:
        if step == ranks:  # all have been heard
            return Posted([], None)
        to, source = (me + step) % ranks, (me - step) % ranks
        asked = needs.runs[to][me]
        message = messages.pack(own, shard.held, asked) if asked else None
        return channel.post(to, message, source, messages.room(own, needs.runs[me][source]))

    posted = post(1)
    yield me, shard.held, own
    for step in range(1, ranks):
        source = (me - step) % ranks
        received = posted.wait()
        posted = post(step + 1)
        runs = needs.runs[me][source]
        yield source, runs, [] if received is None else messages.unpack(received, own, runs)


def _parts(shard: Shard, source: int, runs: Any, of: list[Tensor]) -> Iterator[tuple[slice, slice, Problem]]:
    """The jobs with the keys of one rank: the places of their queries here and of their keys there, and the problem."""
    for job in shard.needs.jobs[shard.channel.rank][source]:
        here, there = messages.place_of(job.queries, shard.asked), messages.place_of(job.keys, runs)
        key, value = (t[:, :, there] for t in of)
        yield here, there, shard.part(job, shard.local.query[:, :, here], key, value)


def _forward(shard: Shard) -> Partial:
    local = shard.local
    assert local.value is not None
    lead, dtype = local.query.shape[:3], accumulated(local.query.dtype)
    new = functools.partial(local.query.new_zeros, dtype=dtype)
    sums = Partial(new((*lead, local.value.shape[-1])), new(lead), new(lead).fill_(torch.inf))
    assert sums.maximum is not None and sums.log_sum is not None
    for source, runs, of in _keys(shard):
        for here, _, problem in _parts(shard, source, runs, of):
            found = engine_of(problem).forward(problem, rows=True)
            before = Partial(sums.output[:, :, here], sums.maximum[:, :, here], sums.log_sum[:, :, here])
            for total, part in zip((sums.output, sums.maximum, sums.log_sum), before.merge(found)[:3], strict=True):
                assert part is not None
                total[:, :, here] = part
    return sums if local.sinks is None else sums.with_sinks(local.sinks.to(dtype)[:, None])


def _backward(shard: Shard, kept: Partial, grad: Tensor, wanted: tuple[bool, ...]) -> Operands:
    """The gradients of this rank's operands; of what all ranks share (weight, bias, sinks) this rank's part."""
    local, channel, needs = shard.local, shard.channel, shard.needs
    assert kept.maximum is not None and kept.log_sum is not None and local.value is not None
    me, ranks = channel.rank, channel.ranks
    rows = Rows(kept.maximum, kept.log_sum, (grad * kept.output).sum(-1))
    sums = Operands(*(None if t is None else torch.zeros_like(t, dtype=grad.dtype) for t in operands(local)))
    assert sums.query is not None and sums.key is not None and sums.value is not None
    of_keys = [sums.key, sums.value]
    every = (True, True, True, *wanted[3:6], False)
    back = []
    for step, (source, runs, of) in enumerate(_keys(shard)):
        found = of_keys if source == me else [torch.zeros_like(t, dtype=grad.dtype) for t in of]
        for (here, there, problem), job in zip(_parts(shard, source, runs, of), needs.jobs[me][source], strict=True):
            own = Rows(*(row[:, :, here] for row in rows))
            part = engine_of(problem).backward(guard(problem), own, grad[:, :, here], every)
            assert part.query is not None and part.key is not None and part.value is not None
            sums.query[:, :, here] += part.query
            found[0][:, :, there] += part.key
            found[1][:, :, there] += part.value
            _add_shared(sums, part, job, needs)
        if source != me:
            to = (me + step) % ranks
            message = torch.cat([t.reshape(-1) for t in found]) if runs else None
            asked = needs.runs[to][me]
            back.append((asked, channel.post(source, message, to, messages.room(of_keys, asked, grad.dtype))))
    for asked, posted in back:
        received = posted.wait()
        if received is not None:
            whole = range(messages.count(asked))
            parts = messages.unpack(received, of_keys, [whole])
            messages.add(of_keys, shard.held, parts, asked)
    if local.sinks is not None and wanted[-1]:
        sums = sums._replace(sinks=sinks_gradient(local.sinks, rows))
    return Operands(*(g if want else None for g, want in zip(sums, wanted, strict=True)))


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
