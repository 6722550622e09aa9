"""The calls inside torch.nn.MultiheadAttention and torch.nn.TransformerEncoderLayer.

These modules project queries and keys inside, so a record projects them again, from the same inputs with the same
weights. A query without an allowed key has weights 0 in the record; the modules give it NaN on one path and 0 on the
other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.masks.causal import Causal
from clearhead.masks.lengths import Lengths
from clearhead.models.interception.handler import ModelHandler
from clearhead.models.interception.intercepted_call import InterceptedCall
from clearhead.models.interception.masks import Recorded
from clearhead.models.interception.modules import kind_of
from clearhead.models.interception.place import Projected
from clearhead.problem.nested import pack


def read(
    handler: ModelHandler,
    query: Tensor,  # (Lq, B, E), or (Lq, E)
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> InterceptedCall:
    """Read a call of F.multi_head_attention_forward, which nn.MultiheadAttention makes off its fast path."""
    kind = kind_of(query, key)
    if query.ndim == 2:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
    biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    packed = None if use_separate_proj_weight or in_proj_weight is None else in_proj_weight.chunk(3)
    to_query, to_key, to_value = (q_proj_weight, k_proj_weight, v_proj_weight) if packed is None else packed
    assert to_query is not None and to_key is not None and to_value is not None
    batch = query.shape[1]

    def projected(
        given: Tensor, weight: Tensor, bias: Tensor | None, learnt: Tensor | None, static: Tensor | None
    ) -> Tensor:
        """The keys, or the values, (B, H, Lk, E), with a learnt one or one of zeros if the module adds it."""
        all_heads = F.linear(given.transpose(0, 1), weight, bias)  # (B, Lk, E)
        if learnt is not None:
            all_heads = torch.cat([all_heads, learnt.to(all_heads.dtype).expand(batch, 1, -1)], dim=1)
        by_head = _heads(all_heads, num_heads) if static is None else static.view(batch, num_heads, *static.shape[1:])
        return F.pad(by_head, (0, 0, 0, 1)) if add_zero_attn else by_head

    # a checkpoint counts the tensors that autograd keeps, and its second run is not recorded
    with torch.set_grad_enabled(handler.differentiable and torch.is_grad_enabled()):
        q = _heads(F.linear(query.transpose(0, 1), to_query, biases[0]), num_heads)
        k = projected(key, to_key, biases[1], bias_k, static_k)
        v = projected(value, to_value, biases[2], bias_v, static_v) if handler.values else None
    keys = key.shape[0] if static_k is None else static_k.shape[1]

    def convert(mask: Tensor) -> Recorded:
        mask = F.pad(mask, (0, k.shape[2] - keys)) if k.shape[2] > keys else mask  # every query sees the added keys
        return handler.masks.convert(mask, nonzero_blocks=mask.dtype == torch.bool)

    masks = Recorded()
    if is_causal and key_padding_mask is None and not need_weights:  # the kernel's flag replaces the mask
        masks = Recorded(Causal(), align="upper_left")
    elif attn_mask is not None:
        masks = convert(attn_mask if attn_mask.ndim == 2 else attn_mask.view(batch, num_heads, *attn_mask.shape[1:]))
    if key_padding_mask is not None:
        masks = masks.plus(convert(key_padding_mask.reshape(batch, 1, 1, keys)))
    if k.shape[2] > keys:  # the keys that are added stand last: query 0 is still at key 0
        masks = replace(masks, align="upper_left")
    place = Projected(out_proj_weight, num_heads, batch_first=False)
    backend, dropout_p = "multi_head_attention_forward", dropout_p if training else 0.0
    inputs = [t.transpose(0, 1) for t in (query, key, value)]
    notes, last = handler.stack.notes, (out_proj_weight, out_proj_bias)
    origin = notes and notes.projected(inputs, (to_query, to_key, to_value), biases, last)
    return InterceptedCall(q, k, v, backend, lambda: masks, place, kind=kind, dropout_p=dropout_p, origin=origin)


def read_native(
    handler: ModelHandler,
    query: Tensor,  # (B, Lq, E)
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> InterceptedCall:
    """Read a call on the fast path of nn.MultiheadAttention. In its masks, bool or float, 0 means "allowed"."""
    kind = kind_of(query, key)
    masks = Recorded()
    if mask is not None:
        # a mask of type 1 is a padding mask, (B, Lk); others are (Lq, Lk) or (B, H, Lq, Lk)
        masks = handler.masks.convert(mask[:, None, None] if mask_type == 1 else mask, nonzero_blocks=True)
    if query.is_nested:
        masks = Recorded(Lengths(pack({"query": query, "key": key}, "").edges.count_keys(query.device)))
        query, key, value = (t.to_padded_tensor(0.0) if t.is_nested else t for t in (query, key, value))
    weights, biases = qkv_weight.chunk(3), qkv_bias.chunk(3)
    wanted = list(zip((query, key, value), weights, biases, strict=True))[: 3 if handler.values else 2]
    q, k, *v = (_heads(F.linear(x, weight, bias), num_head) for x, weight, bias in wanted)
    place = Projected(proj_weight, num_head, batch_first=True)
    notes, backend = handler.stack.notes, "_native_multi_head_attention"
    origin = notes and notes.projected((query, key, value), weights, biases, (proj_weight, proj_bias))
    return InterceptedCall(q, k, v[0] if v else None, backend, lambda: masks, place, kind=kind, origin=origin)


def read_layer(
    handler: ModelHandler,
    src: Tensor,  # (B, L, E)
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    *rest: Any,
) -> InterceptedCall:
    """Read a call on the fast path of nn.TransformerEncoderLayer, which calls no module inside.

    `rest`: weights and biases of the second norm and the two linear layers, then the mask and its type.
    """
    x = F.layer_norm(src, (embed_dim,), norm_weight_1, norm_bias_1, eps) if norm_first else src
    innermost = handler.stack.innermost
    own = getattr(innermost.module, "self_attn", None) if innermost else None
    weights, (mask, mask_type) = (qkv_weight, qkv_bias, proj_weight, proj_bias), (*rest[6:], None, None)[:2]
    call = read_native(handler, x, x, x, embed_dim, num_heads, *weights, mask, mask_type=mask_type)
    call.backend, call.name = "_transformer_encoder_layer_fwd", handler.stack.names.get(id(own))
    call.place = None  # the output of the heads is inside of the function
    return call


def _heads(projected: Tensor, heads: int) -> Tensor:
    """A tensor (B, L, E) as (B, H, L, E / H)."""
    by_head: Tensor = projected.unflatten(-1, (heads, -1))  # type: ignore[no-untyped-call]
    return by_head.transpose(1, 2)
