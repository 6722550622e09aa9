"""PyTorch's fused kernel as an operation that is twice differentiable."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from clearhead.base.arrays import in_memory_still
from clearhead.base.shapes import Sizes
from clearhead.base.torch_state.batched import Gradients, unbatched
from clearhead.base.torch_state.contexts import without_autocast
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.tensor_kind import has_own_dispatch, materialize_zeros
from clearhead.base.torch_state.torch_private import OWN_SDPA, flash, flash_backward, fused_choice
from clearhead.biases.base import Added
from clearhead.engines.base import by_autograd
from clearhead.engines.tiled.engine import PLAIN
from clearhead.masks.base import Spans
from clearhead.problem.problem import Problem
from clearhead.problem.visible import visible
from clearhead.scores.base import Pairwise

FLASH = 1  # SDPBackend.FLASH_ATTENTION
# With a mask, 64 keys modulo 128 and a log-sum-exp below −88.7, cuDNN's backward pass gives NaN for the query on an
# H100 (PyTorch 2.11 to 2.13, pytorch/pytorch#196678).
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    grouped: bool = False,
) -> Tensor:
    """Call PyTorch's own `scaled_dot_product_attention`, whatever replaces it; `grouped`: there are fewer key heads."""
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if needs_grad and query.is_cpu and _may_be_a_step():
        choice = fused_choice(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped)
        if choice == FLASH:
            if mask is not None and mask.dtype == torch.bool:  # the kernel takes an additive mask
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
            found: Tensor = _Flash.apply(query, key, value, scale, mask, causal)  # type: ignore[no-untyped-call]
            return found
    wrong = needs_grad and query.is_cuda and mask is not None and key.shape[-2] % 128 == 64
    with sdpa_kernel(WITHOUT_CUDNN) if wrong else nullcontext():
        return OWN_SDPA(  # type: ignore[no-any-return]
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )


def _may_be_a_step() -> bool:
    """Return whether `_Flash` can run: not where PyTorch traces or transforms single operations.

    Other dispatch modes, such as one that counts operations, change nothing: a checkpoint may compute again under one,
    and must save the same tensors.
    """
    mode = get_mode()
    return not (mode.compiled or mode.traced or mode.operations_only)


class _Flash(torch.autograd.Function):
    """The kernel that SDPA runs on a CPU, whose second derivatives go through blocks of plain operations."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None, causal: bool
    ) -> Tensor:
        output, logsumexp = flash(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
        # save logsumexp first: if a checkpoint recomputes by another function, shapes differ, which is an error
        ctx.save_for_backward(logsumexp, query, key, value, output, mask)
        ctx.scale, ctx.causal = scale, causal
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0]
        logsumexp, *inputs, output, mask = in_memory_still(ctx.saved_tensors)
        again = torch.is_grad_enabled()
        if again or has_own_dispatch(grad):
            return (*_by_blocks(inputs, grad, ctx, mask, again), None, None, None)

        def compute(grad: Tensor) -> Gradients:
            found: Gradients = flash_backward(
                materialize_zeros(grad), *inputs, output, logsumexp, 0.0, ctx.causal, attn_mask=mask, scale=ctx.scale
            )
            return found

        return (*unbatched(compute, grad), None, None, None)


def _by_blocks(inputs: list[Tensor], grad: Tensor, ctx: Any, mask: Tensor | None, again: bool) -> Gradients:
    """Compute the gradients by autograd, through blocks of plain operations."""
    query, key, value = inputs
    sizes = Sizes(query.shape[0], query.shape[1], query.shape[2], key.shape[2], query.device)
    allowed = None
    if ctx.causal:
        stop = torch.arange(1, sizes.queries + 1, device=query.device).view(1, 1, -1)
        allowed = visible(Spans(torch.zeros_like(stop), stop), sizes)
    bias = None if mask is None else Added(mask.expand(sizes.shape))
    problem = Problem(Pairwise("mul", query, key, None, ctx.scale), value, sizes, allowed, bias)
    wanted = *ctx.needs_input_grad[:3], False, False, False, False
    with without_autocast(sizes.device):
        return by_autograd(PLAIN, problem, wanted, grad, again)[:3]
