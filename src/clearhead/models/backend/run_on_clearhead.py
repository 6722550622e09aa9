"""Running a model of transformers on clearhead."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from copy import copy
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from clearhead import _attention
from clearhead._attention import Arguments
from clearhead.base.errors import ClearheadError, UnsupportedError, require
from clearhead.base.shapes import Align
from clearhead.base.torch_state.mode import get_mode
from clearhead.distributed import Layout
from clearhead.distributed.layout import check_layout
from clearhead.masks.base import Mask
from clearhead.masks.causal import Causal
from clearhead.masks.dense import DenseMask
from clearhead.models.backend.ranks import Hook, attend, make_mask, remove
from clearhead.models.interception.keywords import MASKED, NAME, RANKS, check_keywords, documents, dot, selected
from clearhead.models.interception.masks import converted, keep_made, made_of
from clearhead.models.interception.padding import parameters
from clearhead.models.interception.transformers_private import takes_backends, takes_sdpa

KNOWN_LAYERS = {"full_attention", "sliding_attention", "sparse", "dense"}
OWN_POSITIONS = {"csm_depth_decoder_model"}  # though its forward has the name
MIXING = re.compile(r"Mamba|SSM|Rwkv|RWKV|Recurrent|RgLru|LinearAttention|DeltaNet|ShortConv|Lightning|Retention")

Model = TypeVar("Model", bound=nn.Module)


def run_on_clearhead(model: Model, *, layout: Layout | None = None) -> Model:
    """Run a model of transformers on clearhead's engines: its attention, and its masks.

    >>> import torch, clearhead as ch
    >>> from transformers import LlamaConfig, LlamaModel
    >>> model = LlamaModel(LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    ...                                num_attention_heads=8, num_key_value_heads=2)).eval()
    >>> ch.models.run_on_clearhead(model)(input_ids=torch.arange(10)[None]).last_hidden_state.shape
    torch.Size([1, 10, 64])

    `model`: a transformers model whose backend can be set (`set_attn_implementation`). It is changed, and returned;
    this is no context manager. `model.set_attn_implementation("sdpa")` sets it back.
    The model gets copies of its configuration objects (`model.config` is another object after the call), so that other
    models that were made from the same objects keep their backends. Make later changes in the new `model.config`.
    Softcaps, sinks, position biases, grouped heads, windows and padding are taken as the model gives them. Pairs that
    its masks exclude are skipped, and a mask is converted once for all layers. A query that sees nothing gets 0.
    `layout`: which rank of a group holds which positions, such as `clearhead.distributed.ZigZag(length, group)`. With a
    layout the model is called on every rank with that rank's part of a batch, and gives the outputs of its positions:

        ch.models.run_on_clearhead(model, layout=layout)
        part = ch.distributed.shard_batch(batch, layout)
        loss = part.loss(model(**part.inputs).logits)

    With `output_attentions=True` it warns, and gives no weights; inside `ch.models.lazy_attentions(model)` it gives
    lazy ones.
    Every layer's attention is `clearhead.distributed.attention`, under the masks of the whole sequence: causal or
    bidirectional, sliding windows, padding, and packed documents, where the position ids of a causal model begin again.
    All other layers compute each position by itself. So a layer that pools, or reads the first token, sees only this
    rank's part. A layout is for one length; call this function again to give the model another layout, or none. The
    gradients of parameters are each rank's terms of a sum: see `shard_batch`, also for DDP and FSDP.
    Raises a `ClearheadError` for other models and layouts. With a layout it raises an error for a model whose positions
    meet elsewhere than in attention, and in a call with `labels`, with a cache, or without `position_ids`. Cost: that
    of `attention`. With a layout the ranks send each other position ids and attention masks once a call, and in each
    layer the messages that `clearhead.distributed.plan` shows.
    """
    transformers = require("transformers", "models", "run_on_clearhead")
    if not isinstance(model, transformers.PreTrainedModel):
        raise ClearheadError(
            f"run_on_clearhead takes a model of transformers; got a {type(model).__name__}: pass the model inside it."
        )
    if layout is not None:
        check_layout(layout)
        if empty := [rank for rank in range(layout.ranks) if not layout.count(rank)]:
            raise ClearheadError(f"{layout} gives rank {empty[0]} no position: use a layout with some for each rank.")
        for why in _reasons(model):
            name = type(model).__name__
            raise UnsupportedError(f"{name} cannot be given a layout: {why}. Try run_on_clearhead(model).")
    for backend in (NAME, MASKED):
        transformers.AttentionInterface.register(backend, partial(_attend, backend))
        transformers.AttentionMaskInterface.register(backend, partial(_mask, backend, transformers.masking_utils))
    transformers.AttentionInterface.register(RANKS, attend)
    transformers.AttentionMaskInterface.register(RANKS, make_mask)
    if not takes_backends(model):
        raise ClearheadError(f"{type(model).__name__} computes attention in its own code, and takes no other backend.")
    parts = [part for part in model.modules() if isinstance(part, transformers.PreTrainedModel)]
    remove(parts)
    _own_configs(model, transformers.PreTrainedConfig)
    if layout is not None:
        model.set_attn_implementation(RANKS)
        Hook(layout).attach(parts)
    else:
        model.set_attn_implementation(NAME if all(takes_sdpa(part) for part in parts) else MASKED)
    return model


def _own_configs(model: nn.Module, kind: type) -> None:
    """Give the model and its layers copies of their configurations, which name the backend.

    Models that were made from one configuration share it, so the backend of one model would be that of all.
    """
    own: dict[int, Any] = {}

    def copied(config: Any) -> Any:
        if id(config) not in own:
            own[id(config)] = mine = copy(config)
            for name, inner in vars(mine).items():
                if isinstance(inner, kind):
                    mine.__dict__[name] = copied(inner)
        return own[id(config)]

    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, kind):
                module.__dict__[name] = copied(value)


def _mask(backend: str, masks: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    """The mask that SDPA or eager attention would get, with its normal form as an attribute.

    In compiled code a tensor can have no such attribute; there the mask is a plain bool tensor.
    """
    if backend == MASKED:
        kwargs["allow_is_causal_skip"] = False
    compiled = get_mode().compiled
    make = masks.eager_mask if backend == MASKED and not compiled else masks.sdpa_mask
    mask: Tensor | None = make(*args, **kwargs)
    return mask if mask is None or compiled else keep_made(mask)


def _attend(
    backend: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function of the attention interface: gives (B, Lq, H, Ev), and no weights."""
    align: Align = None
    mask: Tensor | Mask | None = attention_mask
    shape = (*query.shape[:3], key.shape[2])
    made, bias = made_of(attention_mask, shape), kwargs.get("position_bias")
    check_keywords(type(module).__name__, backend, kwargs)
    if kwargs.get("output_attentions") and not get_mode().compiled:
        warnings.warn(
            f"{type(module).__name__} runs on clearhead's engines, which give no weights, so the model's attentions "
            "are empty. For lazy weights of every layer: with ch.models.lazy_attentions(model): model(…).",
            stacklevel=2,
        )
    narrower = _narrower(module, shape, attention_mask is not None, kwargs)
    if attention_mask is None:
        causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
        if backend == NAME and causal and query.shape[2] > 1:
            mask, align = Causal(), "upper_left"
    elif made is not None and made.keys is not None and narrower is None and bias is None and not dropout:
        # attention over the keys that are seen, without a mask: the room of a cache for later tokens is not read
        key, value, mask = key[:, :, made.keys], value[:, :, made.keys], None
    elif made is not None:
        mask = made.mask(attention_mask)
    if narrower is not None:
        if attention_mask is None and kwargs.get("block_indices") is not None:
            mask = None  # such a mask is causal already, by the model's positions
        if isinstance(mask, Tensor):
            given = converted(mask.detach(), None)
            mask, bias = given.mask, given.bias if bias is None else bias if given.bias is None else bias + given.bias
        mask = narrower if mask is None else mask & narrower
    # scores and sinks as the model's keywords give them
    score, s = dot(scaling, kwargs.get("softcap")), kwargs.get("s_aux")
    # not attention(): a monitor of compiled code has read this call from the interface
    call = Arguments(query, key, value, score, mask, bias, sinks=s, align=align, dropout_p=dropout)
    return _attention.attend(call).output.transpose(1, 2).contiguous(), None


def _narrower(module: nn.Module, shape: tuple[int, int, int, int], masked: bool, kwargs: dict[str, Any]) -> Mask | None:
    """The mask tensor, narrowed by the masks that the keywords give."""
    chosen = selected(module, kwargs, shape, masked)
    packed = documents(kwargs, shape[0], *shape[2:])
    if chosen is None:
        return packed
    return DenseMask(chosen) if packed is None else DenseMask(chosen) & packed


def _reasons(model: Any) -> Iterator[str]:
    """The reasons why a model cannot be given a layout."""
    configs = list({id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values())
    if any(getattr(config, "is_encoder_decoder", False) for config in configs):
        yield "it has an encoder and a decoder, and cross attention between them"
    if any(getattr(config, "token_dropout", False) for config in configs):  # ESM
        yield "its token dropout scales embeddings by how many tokens of a sequence are masked"
    if any(config.model_type in OWN_POSITIONS for config in configs):
        yield "it reads no position_ids, and counts positions by itself"
    kinds = {kind for config in configs for kind in getattr(config, "layer_types", None) or ()}
    if kinds - KNOWN_LAYERS:
        yield f"it has layers of the kind {', '.join(sorted(kinds - KNOWN_LAYERS))}"
    for name, part in model.named_modules():
        along = isinstance(part, nn.Conv1d) and part.kernel_size[0] > 1
        if along or isinstance(part, nn.RNNBase) or MIXING.search(type(part).__name__):
            yield f"its layer {name}, a {type(part).__name__}, mixes positions outside of attention"
    if any("position_ids" not in parameters(part.forward) for part in (model, model.base_model)):
        yield "its forward takes no position_ids, so each rank would count its positions from 0"
