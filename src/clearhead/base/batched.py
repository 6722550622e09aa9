"""Gradients for a batch of losses at once (`is_grads_batched`, vmap): computed one by one, and stacked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clearhead.base.tracing import batched

Gradients = tuple[Tensor | None, ...]


def unbatched(compute: Callable[[Tensor], Gradients], grad: Tensor) -> Gradients:
    """`compute(grad)`, one by one for the gradients that `grad` batches."""
    if torch._C._functorch.is_legacy_batchedtensor(grad):
        return _each_of(compute, grad)
    found: Gradients = _OneByOne.apply(compute, grad) if batched(grad) else compute(grad)  # type: ignore[no-untyped-call]
    return found


def _each_of(compute: Callable[[Tensor], Gradients], grad: Tensor) -> Gradients:
    """The gradients for each gradient of the output that `is_grads_batched=True` has batched."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    each = [unbatched(compute, one) for one in torch._remove_batch_dim(grad, level, 0, 0).unbind()]
    joined = (None if parts[0] is None else torch.stack(parts) for parts in zip(*each, strict=True))
    return tuple(None if whole is None else torch._add_batch_dim(whole, 0, level) for whole in joined)


class _OneByOne(torch.autograd.Function):
    """The same for a batch of `torch.func.vmap`."""

    @staticmethod
    def forward(compute: Callable[[Tensor], Gradients], grad: Tensor) -> Gradients:
        return unbatched(compute, grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, compute: Callable[[Tensor], Gradients], grad: Tensor) -> tuple[Any, Any]:
        each = [_OneByOne.apply(compute, one) for one in grad.unbind(in_dims[1])]  # type: ignore[no-untyped-call]
        joined = [None if parts[0] is None else torch.stack(parts) for parts in zip(*each, strict=True)]
        return tuple(joined), tuple(None if whole is None else 0 for whole in joined)
