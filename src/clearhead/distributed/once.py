"""Derivatives of attention over ranks: first ones, in backward mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.base.errors import UnsupportedError
from clearhead.base.torch_state.batched import Compute, Gradients, unbatched
from clearhead.base.torch_state.contexts import without_autocast
from clearhead.base.torch_state.mode import get_mode


def refuse_transforms() -> None:
    """Raise an error inside `torch.func`, forward mode and tracers, before a message is sent."""
    mode = get_mode()
    if mode.operations_only or mode.traced:
        raise UnsupportedError(
            "attention over ranks has derivatives by .backward() and torch.autograd.grad alone: torch.func, forward "
            "mode and make_fx do not see what the ranks send. Call it outside of them."
        )


def gradients(compute: Compute, grads: tuple[Tensor, ...], read: tuple[Tensor | None, ...]) -> Gradients:
    """The result of `compute(*grads)`, which also reads `read`. To differentiate it again is an error."""
    again = torch.is_grad_enabled()
    with torch.no_grad(), without_autocast(grads[0].device):  # backward may be called under autocast
        found = unbatched(compute, *grads)
    return _Once.apply(len(found), *found, *grads, *read) if again else found  # type: ignore[no-untyped-call]


class _Once(torch.autograd.Function):
    """Passes gradients on unchanged, and refuses second derivatives, which would otherwise be silently left out."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> Gradients:
        return tuple(None if t is None else t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise UnsupportedError(
            "attention over ranks is differentiable once, and here a gradient of it is differentiated: second "
            "derivatives are those of clearhead.attention() in one process."
        )
