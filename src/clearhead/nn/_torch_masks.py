"""The masks of torch.nn.MultiheadAttention, True where a query may not attend, as `attention` takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.shapes import unflatten
from clearhead.base.tracing import compiling, readable, without_autocast
from clearhead.engines import reference
from clearhead.masks.base import Mask
from clearhead.masks.causal import Causal
from clearhead.masks.dense import DenseMask
from clearhead.problem.guard import guard
from clearhead.problem.problem import make_problem

_CAUSAL = Causal()


def from_torch_masks(
    attn_mask: Any, key_padding_mask: Any, query: Tensor, key: Tensor, is_causal: bool, batched: bool
) -> tuple[Mask | None, Tensor | None]:
    """The mask, and the bias added to the scores, for query (B, H, Lq, E) and key (B, H, Lk, E)."""
    batch, heads, queries, keys = max(query.shape[0], key.shape[0]), *query.shape[1:3], key.shape[2]
    masks: list[Mask] = [_CAUSAL] if is_causal else []
    added: list[Tensor] = []
    if attn_mask is not None:
        shapes = ((queries, keys), (batch * heads, queries, keys))
        _check(attn_mask, "attn_mask", "(Lq, Lk) or (B·H, Lq, Lk)", shapes, query)
        if not is_causal:  # torch's module follows the hint without checking it
            whole = attn_mask if attn_mask.ndim == 2 else unflatten(attn_mask, 0, batch, heads)
            _sort(whole[(None,) * (4 - whole.ndim)], masks, added)
    if key_padding_mask is not None:
        shape, words = ((batch, keys), "(B, Lk)") if batched else ((keys,), "(Lk,)")
        _check(key_padding_mask, "key_padding_mask", words, (shape,), query)
        _sort(key_padding_mask.reshape(batch, 1, 1, keys), masks, added)
    mask = masks[0] & masks[1] if len(masks) == 2 else masks[0] if masks else None
    return mask, added[0] + added[1] if len(added) == 2 else added[0] if added else None


def _check(mask: Any, name: str, words: str, shapes: tuple[tuple[int, ...], ...], query: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise ClearheadError(
            f"{name} is a {type(mask).__name__}; expected a tensor, as torch.nn.MultiheadAttention has it. "
            "MultiHeadAttention takes Masks, such as Causal()."
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ClearheadError(
            f"{name} has dtype {mask.dtype}, shape {tuple(mask.shape)}; expected bool, True where a query may not "
            "attend, or float, added to the scores. For a tokenizer's 0/1 attention_mask, (B, Lk), pass "
            "key_padding_mask=attention_mask == 0."
        )
    if tuple(mask.shape) not in shapes:
        expected = " or ".join(f"{shape}" for shape in shapes)
        raise ShapeError(f"{name} has shape {tuple(mask.shape)}; expected {words} = {expected}.")
    if mask.device != query.device:
        raise ClearheadError(f"{name} is on {mask.device}, and the inputs on {query.device}; pass {name}.to(query).")


def _sort(tensor: Tensor, masks: list[Mask], added: list[Tensor]) -> None:
    """Bool tensors, and float ones of 0 and −∞ alone, become masks, which skip work; others are added."""
    if tensor.dtype == torch.bool:
        masks.append(DenseMask(~tensor))
    elif _only_blocks(tensor):
        masks.append(DenseMask(tensor == 0))
    else:
        added.append(tensor)


def _only_blocks(tensor: Tensor) -> bool:
    """Whether a float mask is zeros and minus infinities: torch's layers convert every bool mask to that."""
    if tensor.requires_grad or not readable(tensor):
        return False
    return bool(((tensor == 0) | (tensor == -torch.inf)).all())


def in_full(query: Tensor, key: Tensor, mask: Any, bias: Any, average: bool) -> Tensor:
    """The whole matrix of the weights, before dropout, with gradients: (B, Lq, Lk), or (B, H, Lq, Lk)."""
    problem = make_problem(query, key, mask=mask, bias=bias, as_written=True)
    with without_autocast(query.device):
        weights = reference.weights(problem if compiling() else guard(problem)).to(problem.query.dtype)
    return weights.mean(1) if average else weights
