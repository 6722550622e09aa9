"""Models that cannot have a layout: those whose positions meet elsewhere than in attention, for one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from clearhead.base.errors import ClearheadError, UnsupportedError
from clearhead.distributed import Layout
from clearhead.models.tap.padding import parameters

KNOWN_LAYERS = {"full_attention", "sliding_attention", "sparse", "dense"}
OWN_POSITIONS = {"csm_depth_decoder_model"}  # though its forward has the name
MIXING = re.compile(r"Mamba|SSM|Rwkv|RWKV|Recurrent|RgLru|LinearAttention|DeltaNet|ShortConv|Lightning|Retention")


def refuse(model: Any, layout: Layout) -> None:
    """Raise for a model that cannot be given this layout, and say what is in the way."""
    if empty := [rank for rank in range(layout.ranks) if not layout.count(rank)]:
        raise ClearheadError(
            f"{layout} gives rank {', '.join(map(str, empty))} no position, and models of transformers cannot be "
            "called with none: use a layout with some for each rank, or a smaller group."
        )
    for why in _reasons(model):
        raise UnsupportedError(
            f"{type(model).__name__} cannot be given a layout: {why}. Its sequences cannot be shared out over ranks; "
            "run it with run_on_clearhead(model), whole sequences on each rank."
        )


def _reasons(model: Any) -> Iterator[str]:
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
