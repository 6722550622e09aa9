"""Derivatives of attention over ranks: first ones, in backward mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.base.batched import Compute, Gradients, unbatched
from clearhead.base.errors import UnsupportedError
from clearhead.base.tracing import forward_mode, traced, transformed, without_autocast


def refuse_transforms() -> None:
    """Raise inside `torch.func`, forward mode and tracers, before a message is sent."""
    if transformed() or forward_mode() or traced():
        raise UnsupportedError(
            "attention over ranks has derivatives by .backward() and torch.autograd.grad alone: torch.func, forward "
            "mode and make_fx do not see what the ranks send. Call it outside of them."
        )


def gradients(compute: Compute, grads: tuple[Tensor, ...], read: tuple[Tensor | None, ...]) -> Gradients:
    """`compute(*grads)`, which reads `read` too: it cannot be differentiated again, and says so."""
    again = torch.is_grad_enabled()
    with torch.no_grad(), without_autocast(grads[0].device):  # backward may be called under autocast
        found = unbatched(compute, *grads)
    return _Once.apply(len(found), *found, *grads, *read) if again else found  # type: ignore[no-untyped-call]


class _Once(torch.autograd.Function):
    """Gradients, as they are; theirs, of what they were computed from, are refused, since they would be left out."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> Gradients:
        return tuple(None if t is None else t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise UnsupportedError(
            "attention over ranks is differentiable once, and here a gradient of it is differentiated: second "
            "derivatives are those of clearhead.attention() in one process."
        )
