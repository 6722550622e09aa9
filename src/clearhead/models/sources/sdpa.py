"""A direct call of scaled_dot_product_attention."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.masks.causal import Causal
from clearhead.models._masks import Recorded
from clearhead.models._place import Separate
from clearhead.models._receiver import Answer, DotCall, Receiver


def read(
    receiver: Receiver,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Answer:
    receiver.check(query, key)
    leading = query.shape[:-2]
    if not enable_gqa:
        leading = torch.broadcast_shapes(leading, key.shape[:-2])  # type: ignore[no-untyped-call]
    elif query.ndim == key.ndim == 3:  # (H, L, E): the heads come third from the last
        query, key, value = query[None], key[None], value[None]
    if max(query.ndim, key.ndim) != 4:
        query, key, value, attn_mask = _four(query, key, value, attn_mask, leading)
        shape = (*query.shape[:3], value.shape[-1])
    else:
        shape = (leading[:-1].numel(), leading[-1], query.shape[2], value.shape[-1])
    masks = receiver.masks.convert(attn_mask)
    if is_causal:
        masks = masks.plus(Recorded(Causal(), align="upper_left"))
    place = Separate(lambda t: t.reshape(shape), lambda output: output.reshape(*leading, *shape[2:]))
    return receiver.dots(DotCall(query, key, value, masks, "sdpa", place, scale=scale, dropout_p=dropout_p))


def _four(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, leading: torch.Size
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(B, H, L, E): all but the last three dimensions, or without heads all but the last two, are the batch."""
    batch, heads = (leading[:-1], leading[-1:]) if len(leading) > 2 else (leading, (1,))
    if mask is not None and mask.ndim > 2:
        mask = mask.expand(*leading, -1, -1).reshape(-1, *heads, *mask.shape[-2:])
    query, key, value = (
        t.expand(*leading, -1, -1).reshape(batch.numel(), *heads, *t.shape[-2:]) for t in (query, key, value)
    )
    return query, key, value, mask
