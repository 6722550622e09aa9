"""Attention over keys that are fetched at once: autograd follows the computation with them, for every score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.torch_state.batched import Gradients
from clearhead.distributed import rows as messages
from clearhead.distributed.channel import Channel
from clearhead.distributed.needs import Job, Needs
from clearhead.distributed.once import gradients
from clearhead.distributed.pieces import Shard
from clearhead.engines import operation
from clearhead.engines.choose import choose


class _Fetch(torch.autograd.Function):
    """Fetches the rows of key and value that this rank needs, in the order of the ranks, and sends gradients back."""

    @staticmethod
    def forward(ctx: Any, needs: Needs, channel: Channel, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        ctx.needs, ctx.channel = needs, channel
        own = key.contiguous(), value.contiguous()
        ctx.save_for_backward(*own)
        me, ranks, held = channel.rank, channel.ranks, needs.layout.own(channel.rank)
        posted = {}
        for step in range(1, ranks):
            to, source = (me + step) % ranks, (me - step) % ranks
            asked = needs.runs[to][me]
            message = messages.pack(own, held, asked) if asked else None
            posted[source] = channel.post(to, message, source, messages.room(own, needs.runs[me][source]))
        received = {source: each.wait() for source, each in posted.items()}
        received[me] = messages.pack(own, held, needs.runs[me][me]) if needs.runs[me][me] else None
        parts = []
        for rank, runs in enumerate(needs.runs[me]):
            message = received[rank]
            parts.append([t[:, :, :0] for t in own] if message is None else messages.unpack(message, own, runs))
        return tuple(torch.cat([part[at] for part in parts], 2) for at in range(2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        own = ctx.saved_tensors
        return None, None, *gradients(lambda *grads: _sent_back(ctx.needs, ctx.channel, own, grads), grads, ())


def _sent_back(needs: Needs, channel: Channel, own: Sequence[Tensor], grads: Sequence[Tensor]) -> Gradients:
    """The gradients of this rank's keys and values, from its own queries and from those of the other ranks."""
    me = channel.rank
    sums = [torch.zeros_like(t, dtype=accumulated(t.dtype)) for t in own]
    by_rank = needs.rows[me]
    parts = [torch.split(g, by_rank, 2) for g in grads]
    posted = []
    for step in range(1, channel.ranks):
        to, source = (me - step) % channel.ranks, (me + step) % channel.ranks
        message = torch.cat([part[to].reshape(-1) for part in parts]) if by_rank[to] else None
        asked = needs.runs[source][me]
        posted.append((asked, channel.post(to, message, source, messages.room(own, asked))))
    held = needs.layout.own(me)
    messages.add(sums, held, [part[me] for part in parts], needs.runs[me][me])
    for asked, each in posted:
        received = each.wait()
        if received is not None:
            messages.add(sums, held, messages.unpack(received, own, [range(sum(map(len, asked)))]), asked)
    return tuple(total.to(t.dtype) for total, t in zip(sums, own, strict=True))


def attend(shard: Shard) -> Tensor:
    """The output (B, H, lq, Ev) of this rank's queries: one problem for each chunk of queries, over all its keys."""
    local, needs, me = shard.local, shard.needs, shard.channel.rank
    assert local.value is not None
    key, value = _Fetch.apply(needs, shard.channel, local.key, local.value)  # type: ignore[no-untyped-call]
    fetched = [run for runs in needs.runs[me] for run in runs]
    outputs = []
    for queries in shard.held:
        query = local.query[:, :, messages.place_of(queries, shard.held)]
        runs = sorted(
            (job.keys for jobs in needs.jobs[me] for job in jobs if job.queries == queries), key=lambda r: r.start
        )
        if not runs:
            outputs.append(query.new_zeros(*query.shape[:3], value.shape[-1]))
            continue
        hull = range(runs[0].start, runs[-1].stop)
        own = (_laid_out(of, fetched, runs) for of in (key, value))
        problem = shard.part(Job(queries, hull), query, *own)._replace(sinks=local.sinks)
        outputs.append(operation.run(problem, choose(problem, None)))
    outputs.append(local.query.new_zeros(*local.query.shape[:2], 0, value.shape[-1]))
    # other ranks wait for this one in the backward pass, even where it has fetched nothing
    output: Tensor = torch.cat(outputs, 2) + value[:, :, :0].sum() + local.query[:, :, :0].sum()
    return output


def _laid_out(fetched: Tensor, held: list[range], runs: list[range]) -> Tensor:
    """The rows of these runs, with zeros between the runs, for keys that no query of the chunk sees."""
    parts, end = [], runs[0].start
    for run in runs:
        if run.start > end:
            parts.append(fetched.new_zeros(*fetched.shape[:2], run.start - end, fetched.shape[-1]))
        parts.append(fetched[:, :, messages.place_of(run, held)])
        end = run.stop
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]
