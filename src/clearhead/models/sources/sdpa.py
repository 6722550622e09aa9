"""A direct call of scaled_dot_product_attention."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.masks.causal import Causal
from clearhead.models._masks import Recorded
from clearhead.models.recorder import Recorder


def read(
    recorder: Recorder,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    if not query.is_nested and max(query.ndim, key.ndim) != 4:
        query, key, attn_mask = _four(query, key, attn_mask)
    masks = recorder.masks.convert(attn_mask)
    if is_causal:
        masks = masks.plus(Recorded(Causal(), align="upper_left"))
    recorder.record(query, key, masks=masks, scale=scale, backend="sdpa")


def _four(query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """(B, H, L, E): all but the last three dimensions, or without heads all but the last two, are the batch."""
    leading = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])  # type: ignore[no-untyped-call]
    batch, heads = (leading[:-1], leading[-1:]) if len(leading) > 2 else (leading, (1,))
    if mask is not None and mask.ndim > 2:
        mask = mask.expand(*leading, -1, -1).reshape(-1, *heads, *mask.shape[-2:])
    query, key = (t.expand(*leading, -1, -1).reshape(batch.numel(), *heads, *t.shape[-2:]) for t in (query, key))
    return query, key, mask
