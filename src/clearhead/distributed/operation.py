"""Attention over ranks in compiled code: one operation, as in `engines/operation.py` for one process.

It runs as eager code does: the ranks compare their arguments, and plan their messages, when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated, in_memory_still
from clearhead.base.errors import UnsupportedError
from clearhead.base.torch_state.batched import followed_back
from clearhead.base.torch_state.contexts import with_autograd, without_autocast
from clearhead.distributed import exchange, fetch
from clearhead.distributed.agreement import agree
from clearhead.distributed.layout import Layout, by_number
from clearhead.distributed.pieces import Shard, share_seed
from clearhead.engines.operation import room_for_gradients, room_for_results, save
from clearhead.problem.packing import SCHEMA, TENSORS, in_dtypes, operands, packed, unpacked
from clearhead.problem.partial import Partial, rows_of
from clearhead.problem.problem import Problem


def run(local: Problem, layout: Layout, method: str) -> Tensor:
    """The output (B, H, lq, Ev) of this rank's queries, in float32 at least."""
    tensors, numbers = packed(local)
    grads = torch.is_grad_enabled()
    expected = [grads and t is not None and t.requires_grad for t in operands(local)]
    output: Tensor = attend(*tensors, *numbers, layout.number, method, expected)[0]
    return output


# A packed problem; then the layout, the method, and which operands need a gradient.
ARGUMENTS = f"{SCHEMA}, SymInt layout, str method, bool[] expected"


@torch.library.custom_op(
    "clearhead::attend_over_ranks", mutates_args=(), schema=f"({ARGUMENTS}) -> (Tensor, Tensor, Tensor)"
)
def attend(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of a problem in normal form: output, maximum, log_sum (see `Partial`), in float32 at least."""
    *problem, method, expected = arguments
    query, shard = problem[0], _shard(problem, expected)
    if shard.local.mode.forward_level >= 0:
        raise UnsupportedError("attention over ranks has no derivatives in forward mode.")
    with torch.set_grad_enabled(any(expected)):
        agree(shard, ("attention", method))
    with torch.no_grad(), without_autocast(query.device):
        shard = share_seed(shard)
        if method == "exchange":
            found = exchange.forward(shard)
        else:  # the backward pass fetches the keys again
            rows = torch.zeros(query.shape[:3], dtype=accumulated(query.dtype), device=query.device)
            found = Partial(fetch.attend(shard), rows, rows.clone())
    maximum, log_sum = rows_of(found)
    return found.output.to(accumulated(query.dtype)).contiguous(), maximum.contiguous(), log_sum.contiguous()


attend.register_fake(room_for_results)


@torch.library.custom_op(
    "clearhead::attend_over_ranks_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor output, Tensor maximum, Tensor log_sum, {ARGUMENTS}, bool[] wanted) -> Tensor[]",
)
def attend_backward(grad: Tensor, output: Tensor, maximum: Tensor, log_sum: Tensor, *arguments: Any) -> list[Tensor]:
    """The gradients of the operands, each empty where it is not wanted."""
    *problem, method, _, wanted = arguments
    in_memory_still((grad, output, maximum, log_sum, *problem[:TENSORS]))
    shard = _shard(problem, wanted)
    with without_autocast(grad.device):
        shard = share_seed(shard)
        if method == "exchange":
            with torch.no_grad():
                found = exchange.backward(shard, Partial(output, maximum, log_sum), grad.contiguous(), tuple(wanted))
            gradients = in_dtypes(found, operands(shard.local))
        else:
            with with_autograd():
                again = fetch.attend(shard).to(grad.dtype)
                gradients = followed_back(again, grad, operands(shard.local), wanted)
    return [
        (torch.zeros_like(t) if g is None else g).contiguous() if want and t is not None else grad.new_empty(0)
        for g, t, want in zip(gradients, operands(shard.local), wanted, strict=True)
    ]


@attend_backward.register_fake
def _(grad, output, maximum, log_sum, *arguments):  # type: ignore[no-untyped-def]
    return room_for_gradients(grad, arguments[: len(arguments[-1])], arguments[-1])


def _backward(ctx, grad, *_):  # type: ignore[no-untyped-def]
    wanted = [bool(need) for need in ctx.needs_input_grad[:7]]
    found = attend_backward(grad, *ctx.saved_tensors, *ctx.options, wanted)
    others = (None,) * (len(ctx.needs_input_grad) - len(wanted))
    return (*(g if want else None for g, want in zip(found, wanted, strict=True)), *others)


attend.register_autograd(_backward, setup_context=save)


def _shard(problem: Sequence[Any], needs_grad: list[bool]) -> Shard:
    *numbers, number = problem[TENSORS:]
    layout = by_number(number)
    return Shard.from_problem(unpacked(problem[:TENSORS], tuple(numbers), needs_grad, length=layout.length), layout)
