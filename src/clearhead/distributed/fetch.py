"""Attention over keys that are fetched before any is used: autograd follows the computation, for every score."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.torch_state.batched import Gradients
from clearhead.distributed.needs import Job
from clearhead.distributed.once import gradients
from clearhead.distributed.pieces import Piece, Shard, pieces, place_of, sent_back
from clearhead.engines import operation
from clearhead.engines.choose import choose
from clearhead.problem.packing import without_operands


class _Fetch(torch.autograd.Function):
    """Fetches the rows `fetched` of key and value, which this rank needs, and sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, shard: Shard, fetched: list[range], key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        ctx.shard, ctx.fetched = shard._replace(local=without_operands(shard.local)), fetched
        ctx.save_for_backward(key, value)
        found = [piece for _, piece in pieces(shard) if piece is not None]
        found.sort(key=lambda piece: piece.keys.start)
        none = key[:, :, :0], value[:, :, :0]
        return tuple(torch.cat(parts, 2) for parts in zip(none, *(piece.of for piece in found), strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        own, local = ctx.saved_tensors, ctx.shard.local

        def compute(*grads: Tensor) -> Gradients:
            def add(piece: Piece, of_keys: list[Tensor]) -> None:
                at = place_of(piece.keys, ctx.fetched)
                for total, grad in zip(of_keys, grads, strict=True):
                    total += grad[:, :, at]

            sums = [torch.zeros_like(t, dtype=accumulated(t.dtype)) for t in own]
            # without the keys themselves, which are not needed again: a message without numbers is not sent
            key, value = (t[..., :0] for t in own)
            over = local._replace(scores=local.scores._replace(key=key), value=value)
            sent_back(ctx.shard._replace(local=over), sums, add)
            return tuple(total.to(t.dtype) for total, t in zip(sums, own, strict=True))

        return None, None, *gradients(compute, grads, ())


def attend(shard: Shard) -> Tensor:
    """The output (B, H, lq, Ev) of this rank's queries: one problem for each chunk of queries, over all its keys."""
    local, needs, me = shard.local, shard.needs, shard.channel.rank
    assert local.value is not None
    fetched = sorted((run for runs in needs.runs[me] for run in runs), key=lambda run: run.start)
    key, value = _Fetch.apply(shard, fetched, local.key, local.value)  # type: ignore[no-untyped-call]
    outputs = []
    for queries in shard.held:
        query = local.query[:, :, place_of(queries, shard.held)]
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
        parts.append(fetched[:, :, place_of(run, held)])
        end = run.stop
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]
