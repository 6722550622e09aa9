"""Attention of a sharded sequence: keys are sent to the queries that need them, and gradients back (`pieces`).

The outputs of the parts are merged (`Partial`). The gradients of a part need only the rows of the whole softmax
(`Rows`), so the backward pass fetches the keys again, and sends dK and dV to the ranks that hold the keys.
Sources: Liu et al. 2023, "Ring Attention"; Dao et al. 2022, "FlashAttention", appendix B.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated, in_memory_still
from clearhead.base.torch_state.batched import Gradients
from clearhead.distributed.needs import Job, Needs
from clearhead.distributed.once import gradients
from clearhead.distributed.pieces import Piece, Shard, engine_of, parts, pieces, sent_back
from clearhead.problem.guard import guard
from clearhead.problem.packing import Operands, in_dtypes, operands, with_operands, without_operands
from clearhead.problem.partial import Partial, Rows, rows_of, sinks_gradient


class _Attend(torch.autograd.Function):
    """The output (B, H, lq, Ev) of this rank's queries, in float32 at least."""

    @staticmethod
    def forward(ctx: Any, shard: Shard, *tensors: Tensor | None) -> Tensor:
        shard = shard._replace(local=with_operands(shard.local, tensors))
        found = forward(shard)
        ctx.save_for_backward(*tensors, *found[:3])
        ctx.shard = shard._replace(local=without_operands(shard.local))
        ctx.reads = shard.local.reads()
        return found.output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.reads.check()
        saved, wanted = in_memory_still(ctx.saved_tensors), ctx.needs_input_grad[1:]
        shard = ctx.shard._replace(local=with_operands(ctx.shard.local, saved[: len(wanted)]))

        def compute(grad: Tensor) -> Gradients:
            found = backward(shard, Partial(*saved[len(wanted) :]), grad.contiguous(), wanted)
            return in_dtypes(found, operands(shard.local))

        return (None, *gradients(compute, (grad,), saved))


def attend(shard: Shard) -> Tensor:
    output: Tensor = _Attend.apply(shard, *operands(shard.local))  # type: ignore[no-untyped-call]
    return output


def forward(shard: Shard) -> Partial:
    """The output of this rank's queries, and their rows, in float32 at least."""
    local = shard.local
    assert local.value is not None
    lead, dtype = local.query.shape[:3], accumulated(local.query.dtype)
    new = functools.partial(local.query.new_zeros, dtype=dtype)
    sums = Partial(new((*lead, local.value.shape[-1])), new(lead), new(lead).fill_(torch.inf))
    for _, piece in pieces(shard):
        for _, here, _, problem in parts(shard, piece) if piece else ():
            engine_of(problem).merge(problem, sums.at(here))
    return sums if local.sinks is None else sums.with_sinks(local.sinks.to(dtype)[:, None])


def backward(shard: Shard, kept: Partial, grad: Tensor, wanted: tuple[bool, ...]) -> Operands:
    """The gradients of this rank's operands; for what all ranks share (weight, bias, sinks), this rank's part."""
    local = shard.local
    rows = Rows(*rows_of(kept), (grad * kept.output).sum(-1))
    learnt = (True, True, True, *wanted[3:6], False)
    new = functools.partial(torch.zeros, dtype=grad.dtype, device=grad.device)
    pairs = zip(operands(local), learnt, strict=True)
    sums = Operands(*(new(t.shape) if want and t is not None else None for t, want in pairs))
    assert sums.query is not None and sums.key is not None and sums.value is not None
    query = sums.query

    def add(piece: Piece, of_keys: list[Tensor]) -> None:
        for job, here, there, problem in parts(shard, piece):
            own = Rows(*(row[:, :, here] for row in rows))
            key, value = (t[:, :, there] for t in of_keys)
            into = Operands(query[:, :, here], key, value, *_learnt(sums, job, shard.needs))
            engine_of(problem).add_gradients(guard(problem), own, grad[:, :, here], into)

    sent_back(shard, [sums.key, sums.value], add)
    if local.sinks is not None and wanted[-1]:
        sums = sums._replace(sinks=sinks_gradient(local.sinks, rows))
    return Operands(*(g if want else None for g, want in zip(sums, wanted, strict=True)))


def _learnt(sums: Operands, job: Job, needs: Needs) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The parts of the gradients of φ's weight and of the bias to which a job adds."""
    dense, relative = sums.dense, sums.relative
    if dense is not None:
        sides = (slice(None) if n == 1 else slice(s.start, s.stop) for n, s in zip(dense.shape[2:], job, strict=True))
        dense = dense[(..., *sides)]
    if relative is not None:
        first = needs.sizes.queries - job.queries.stop + job.keys.start
        relative = relative[..., first : first + len(job.queries) + len(job.keys) - 1]
    return sums.weight, dense, relative
