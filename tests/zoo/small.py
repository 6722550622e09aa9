"""A configuration made small without knowing its model: fewer layers, words and experts, and widths divided.

All widths and numbers of heads are divided by one number, in all parts of a configuration: so what must agree still
does (the width of a head, the sections of rotary positions, what one part hands to another).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

WORDS = 1000  # how many words are left
SPECIAL = 900  # from here on are the tokens with a meaning, such as the place of an image

LAYERS = re.compile(
    r"(num_(hidden_|encoder_|decoder_)?layers|n_layers?|(encoder|decoder)_layers|(encoder_|decoder_)?depth|num_blocks"
    r"|(num_)?(text|vision|audio|perceiver|resampler|prediction|qformer)\w*_(layers|depth)|num_hidden_groups"
    r"|(decoder|encoder)_num_(hidden_)?layers)"
)
HEADS = re.compile(r"(\w+_)?(n_heads?|heads|num_heads|attention_heads|num_\w*heads|heads_kv|n_kv_heads|\w+_n_heads)")
WIDTHS = re.compile(
    r"(\w+_)?(hidden_size|intermediate_size|d_model|d_ff|d_inner|n_embd|n_inner|dim|width|size_per_layer_input|ffn_size"
    r"|embedding_size|lora_rank|rnn_width|hidden_dims?|filters|hidden_sizes|mlp_size|feature_size|embed_size|rank)"
)
NO_WIDTHS = re.compile(r"(\w+_)?(head_dim|rope_dim|rotary_dim|dim_head|num_filters|num_mel\w*|mel_dim)|bottleneck_\w+")
EXPERTS = re.compile(r"(\w+_)?(num_(local_|routed_|moe_)?experts|n_routed_experts|moe_num_experts|zero_expert_num)")
CHOSEN = re.compile(r"(\w+_)?(num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|moe_top_k|num_selected_experts)")
TOKENS = re.compile(r"\w*token_(id|index|ids)|\w+_(id|index)")


class Size(NamedTuple):
    """How small. `layers`: of each part, None keeps all. `divisor`: what widths and heads are divided by."""

    layers: int | None
    divisor: int


def shrink(config: Any, size: Size) -> None:
    """Make this configuration, and all that it holds, smaller in place."""
    specials: dict[int, int] = {}
    for part in parts(config):
        if size.layers is not None:
            _fewer_layers(part, size.layers)
        _fewer_words(part, specials)
        _fewer_experts(part)
        for name, value in list(vars(part).items()):
            small = _divided(name, value, size.divisor)
            if small is not None:
                setattr(part, name, small)


def parts(config: Any) -> Iterator[Any]:
    """A configuration and those inside it."""
    from transformers import PreTrainedConfig

    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from parts(value)


def _divided(name: str, value: Any, divisor: int) -> Any:
    if isinstance(value, list | tuple) and value:
        small = [_divided(name.removesuffix("s") if WIDTHS.fullmatch(name) else name, one, divisor) for one in value]
        return None if any(one is None for one in small) else type(value)(small)
    if type(value) is not int:
        return None
    if HEADS.fullmatch(name):
        return value // math.gcd(value, divisor)
    if WIDTHS.fullmatch(name) and not NO_WIDTHS.fullmatch(name) and value % divisor == 0 and value // divisor >= 4:
        return value // divisor
    return None


def _fewer_layers(part: Any, layers: int) -> None:
    """The first layer of each kind, and as many of the others as are wanted."""
    for name, count in list(vars(part).items()):
        if type(count) is not int or not LAYERS.fullmatch(name) or count <= layers:
            continue
        beside = [n for n, v in vars(part).items() if isinstance(v, list | tuple) and len(v) == count]
        kinds = list(zip(*(map(str, getattr(part, n)) for n in beside), strict=True))
        chosen = sorted({kinds.index(kind) for kind in kinds})
        if len(chosen) > 2 * layers:
            chosen = chosen[: 2 * layers]
        chosen = sorted({*chosen, *[i for i in range(count) if i not in chosen][: max(layers - len(chosen), 0)]})
        for other in beside:
            values = getattr(part, other)
            _put(part, other, type(values)(values[i] for i in chosen))
        _put(part, name, len(chosen))


def _put(part: Any, name: str, value: Any) -> None:
    part.__dict__[name] = value  # not checked in between: several attributes change together


def _fewer_words(part: Any, specials: dict[int, int]) -> None:
    for name, value in list(vars(part).items()):
        if re.fullmatch(r"(\w+_)?vocab_size(_\w+)?|n_vocab|\w*vocabulary_size", name):
            if type(value) is int and value > WORDS:
                setattr(part, name, WORDS)
        elif TOKENS.fullmatch(name):
            if type(value) is int and value >= SPECIAL:
                _put(part, name, specials.setdefault(value, SPECIAL + len(specials) % (WORDS - SPECIAL)))
            elif isinstance(value, list) and all(type(one) is int for one in value):
                small = [specials.setdefault(v, SPECIAL + len(specials)) if v >= SPECIAL else v for v in value]
                _put(part, name, small)


def _fewer_experts(part: Any) -> None:
    few = {
        **{name: 4 for name in vars(part) if EXPERTS.fullmatch(name)},
        **{name: 2 for name in vars(part) if CHOSEN.fullmatch(name)},
        **{name: 1 for name in ("n_group", "topk_group") if name in vars(part)},
    }
    for name, most in few.items():
        if type(getattr(part, name)) is int and getattr(part, name) > most:
            setattr(part, name, most)
