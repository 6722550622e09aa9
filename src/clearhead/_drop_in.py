"""`scaled_dot_product_attention`, with torch's signature."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead._attention import attention
from clearhead.base.arrays import check_float, refuse_additive
from clearhead.base.errors import ClearheadError, ShapeError, columns
from clearhead.base.numbers import check_flag
from clearhead.base.shapes import Align
from clearhead.base.torch_state.mode import Mode, get_mode
from clearhead.masks.base import Mask
from clearhead.masks.causal import Causal, causal_alignment
from clearhead.problem.nested import is_nested


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, its signature and its semantics, by clearhead's engines.

    >>> import torch, clearhead as ch
    >>> x = torch.rand(2, 8, 10, 16)
    >>> mine = ch.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> torch.allclose(mine, torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True), atol=1e-6)
    True

    Formula: softmax(query · keyᵀ · scale + attn_mask) · value; the rest is as in `attention`.
    query (..., Lq, E), key (..., Lk, E), value (..., Lk, Ev). `attn_mask`: bool (True: may attend), float (added), a
    causal mask of `torch.nn.attention.bias`, or None. All are broadcast from the right as torch does: of three
    dimensions beside four, the first is the heads. Nested tensors are taken as in `attention`.
    `is_causal`: query 0 stands at key 0, whatever the lengths. `scale`: None is 1/√E. `enable_gqa`: whether there may
    be fewer key heads than query heads, in a number that divides theirs.
    Unlike torch's, its dropout is the same on every engine, and pairs that a mask leaves out are skipped.
    Returns (..., Lq, Ev) of the value's dtype. Raises a `ClearheadError`, which is a RuntimeError too, for attn_mask
    together with is_causal, and for key heads that differ without enable_gqa. Cost: as `attention`. Source: as `Dot`.
    """
    sides = {"query": query, "key": key, "value": value}
    for name, given in sides.items():
        if not isinstance(given, Tensor):
            raise ClearheadError(f"{name} is a {type(given).__name__}; torch's signature takes tensors.")
    is_causal, enable_gqa = check_flag(is_causal, "is_causal"), check_flag(enable_gqa, "enable_gqa")
    if attn_mask is not None:
        if not isinstance(attn_mask, Tensor):
            raise ClearheadError(
                f"attn_mask is a {type(attn_mask).__name__}; expected a tensor, as torch has it. "
                "For a Mask call attention(query, key, value, mask=...)."
            )
        if is_causal:
            raise ClearheadError(
                "attn_mask and is_causal=True: pass one. To join them call attention(query, key, value, "
                "mask=DenseMask(attn_mask) & Causal(), align='upper_left'); of a float attn_mask, "
                "attention(query, key, value, mask=Causal(), bias=attn_mask, align='upper_left')."
            )
    mode = get_mode()
    mask, bias, align = _read_mask(attn_mask, is_causal, mode)
    if isinstance(scale, Tensor) and scale.numel() == 1 and not scale.requires_grad and not mode.vectorized:
        scale = scale.item()  # PyTorch takes such a tensor, without a gradient
    if any(map(is_nested, sides.values())):
        return attention(query, key, value, mask=mask, bias=bias, scale=scale, align=align, dropout_p=dropout_p)
    ranks = {given.ndim for given in sides.values()}
    depth = max(ranks)
    if enable_gqa or len(ranks) > 1:  # dimensions are matched from the right, so the first of three is the heads
        depth = max(depth, 4)
        query, key, value = (given[(None,) * (depth - given.ndim)] for given in (query, key, value))
    if isinstance(mask, Tensor):
        mask = mask[(None,) * (depth - mask.ndim)]
    if bias is not None:
        bias = bias[(None,) * (depth - bias.ndim)]
    heads, key_heads = (t.shape[-3] if t.ndim > 3 else 1 for t in (query, key))
    if not enable_gqa and heads != key_heads and 1 not in (heads, key_heads):
        raise ShapeError(
            "query and key differ in their heads, and enable_gqa is False.\n"
            + columns({"query": tuple(query.shape), "key": tuple(key.shape)}, -3)
            + "\nFor groups of query heads that share a key head pass enable_gqa=True."
        )
    output = attention(query, key, value, mask=mask, bias=bias, scale=scale, align=align, dropout_p=dropout_p)
    return output.reshape(output.shape[depth - max(ranks) :]) if depth > max(ranks) else output


def _read_mask(
    attn_mask: Tensor | None, is_causal: bool, mode: Mode
) -> tuple[Tensor | Mask | None, Tensor | None, Align]:
    """The arguments `mask`, `bias` and `align` of `attention`."""
    if attn_mask is None:
        return (_CAUSAL, None, "upper_left") if is_causal else (None, None, None)
    align = causal_alignment(attn_mask)
    if align is not None:
        return _CAUSAL, None, align
    if attn_mask.is_floating_point():
        check_float(attn_mask, "attn_mask")
        return None, attn_mask, None
    if attn_mask.dtype == torch.bool and mode.vectorized:  # it may differ by sample, and its values are hidden
        added = torch.zeros_like(attn_mask, dtype=torch.float32).masked_fill(~attn_mask, -torch.inf)
        return None, added, None
    if attn_mask.dtype != torch.bool:
        refuse_additive(attn_mask, "attn_mask", "attn_mask={}")
        raise ClearheadError(
            f"attn_mask has dtype {attn_mask.dtype}, shape {tuple(attn_mask.shape)}; expected bool, True where a query "
            "may attend, or float, added to the scores.\nOf a mask of 0 and 1 pass attn_mask.bool()."
        )
    return attn_mask, None, None


_CAUSAL = Causal()
