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
POSITIONS = 48  # of sounds
PATCHES = 8  # along the edge of an image
SPECIAL = 900  # from here on are the tokens with a meaning, such as the place of an image

LAYERS = re.compile(
    r"(num_(hidden_|encoder_|decoder_)?layers|n_layers?|(encoder|decoder)_layers|(encoder_|decoder_)?depth|num_blocks"
    r"|(num_)?(text|vision|audio|perceiver|resampler|prediction|qformer)\w*_(layers|depth)|num_hidden_groups"
    r"|(decoder|encoder)_num_(hidden_)?layers)"
)
HEADS = re.compile(r"(\w+_)?(n_heads?|heads|num_heads|attention_heads|num_\w*heads|heads_kv|n_kv_heads|\w+_n_heads)")
WIDTHS = re.compile(
    r"(\w+_)?(hidden_size|intermediate_size|d_model|d_ff|d_inner|n_embd|n_inner|dim|width|size_per_layer_input|ffn_size"
    r"|embedding_size|d_ssm|lora_rank|rnn_width|hidden_dims?|filters|hidden_sizes|mlp_size|feature_size|embed_size|rank)"
)
NO_WIDTHS = re.compile(r"(\w+_)?(head_dim|rope_dim|rotary_dim|dim_head|num_filters|num_mel\w*|mel_dim)|bottleneck_\w+")
EXPERTS = re.compile(r"(\w+_)?(num_(local_|routed_|moe_)?experts|n_routed_experts|moe_num_experts|zero_expert_num)")
CHOSEN = re.compile(r"(\w+_)?(num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|moe_top_k|num_selected_experts)")
TOKENS = re.compile(r"\w*token_(id|index|ids)|\w+_(id|index)")

# By model type, where the default configuration does not make a model.
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
OVERRIDES: dict[str, dict[str, Any]] = {
    "esm": {"pad_token_id": 1, "mask_token_id": 2},
    "glm4v_text": {"rope_parameters": _SECTIONS},
    "glm_image_text": {"rope_parameters": _SECTIONS},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl_text": {"head_dim": 128},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 48},
    "step3p5": {"sliding_window": 4},
    "dots1": {"n_shared_experts": 1},
    "autoformer": {"prediction_length": 4, "context_length": 16},
    "informer": {"prediction_length": 4, "context_length": 16},
    "time_series_transformer": {"prediction_length": 4, "context_length": 16},
    "diffusion_gemma_text": {"num_experts": 4, "moe_intermediate_size": 64, "top_k_experts": 2},
}


class Size(NamedTuple):
    """How small. `layers`: of each part, None keeps all. `divisor`: what widths and heads are divided by."""

    layers: int | None
    divisor: int


def shrink(config: Any, size: Size) -> None:
    """Make this configuration, and all that it holds, smaller in place."""
    specials: dict[int, int] = {}
    for part in parts(config):
        _mend(part)
        if size.layers is not None:
            _fewer_layers(part, size.layers)
        _shorter(part)
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
        kinds = list(zip(*(map(str, vars(part)[n]) for n in beside), strict=True))
        chosen = sorted({kinds.index(kind) for kind in kinds})
        if len(chosen) > 2 * layers:
            chosen = chosen[: 2 * layers]
        chosen = sorted({*chosen, *[i for i in range(count) if i not in chosen][: max(layers - len(chosen), 0)]})
        for other in beside:
            values = vars(part)[other]
            _put(part, other, type(values)(values[i] for i in chosen))
        _put(part, name, len(chosen))


def _put(part: Any, name: str, value: Any) -> None:
    part.__dict__[name] = value  # not checked in between: several attributes change together


def _mend(part: Any) -> None:
    """What a default configuration leaves open, or what asks for a package that need not be there."""
    values = vars(part)
    values.update(OVERRIDES.get(part.model_type, {}))
    for name, value in values.items():
        if getattr(value, "model_type", "") == "timm_backbone":
            _put(part, name, _backbone(value))
    hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if type(hidden) is int and type(heads) is int and heads and hidden % heads and not values.get("head_dim"):
        _put(part, "num_attention_heads", math.gcd(hidden, heads))
    for name, value in {"vocab_size": WORDS, "num_experts_per_tok": 2, "n_routed_experts": 4}.items():
        if name in values and values[name] is None:
            _put(part, name, value)
    for name in ("width_coefficient", "depth_coefficient"):  # of EfficientNet, whose default is its largest
        if name in values:
            _put(part, name, 1.0)
    if type(values.get("initializer_range")) is float and values["initializer_range"] < 1e-3:
        _put(part, "initializer_range", 0.02)  # else all scores are 0


def _backbone(timm: Any) -> Any:
    """A small ResNet of transformers instead of one of the package timm."""
    from transformers import ResNetConfig

    given = vars(timm).get("out_indices") or vars(timm).get("_out_indices") or [4]
    return ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_indices=[min(index if index >= 0 else 5 + index, 4) for index in given],
    )


def _shorter(part: Any) -> None:
    """An encoder of sounds takes as many frames as it has positions, one of images as many patches."""
    values = vars(part)
    for name in ("max_source_positions", "max_audio_len"):
        if type(values.get(name)) is int and values[name] > POSITIONS:
            _put(part, name, POSITIONS)
    image, patch = values.get("image_size"), values.get("patch_size")
    if type(image) is list and len(image) == 2 and image[0] == image[1] == 1024:  # SAM 2
        _put(part, "image_size", [256, 256])
    for name in ("backbone_feature_sizes", "memory_attention_rope_feat_sizes"):
        if name in values:
            quarters = [[n // 4 for n in one] if type(one) is list else one // 4 for one in values[name]]
            _put(part, name, quarters)
    patches = 2 * PATCHES if any("window" in name or "embedding_size" in name for name in values) else PATCHES
    if type(image) is int and type(patch) is int and patch >= 8 and image % patch == 0 and image // patch > patches:
        _put(part, "image_size", patches * patch)
        if "image_embedding_size" in values:
            _put(part, "image_embedding_size", patches)


def _fewer_words(part: Any, specials: dict[int, int]) -> None:
    for name, value in list(vars(part).items()):
        if re.fullmatch(r"(\w+_)?vocab_size(_\w+)?|n_vocab|\w*vocabulary_size|\w+_vocab", name):
            if type(value) is int and value > WORDS:
                setattr(part, name, WORDS)
        elif TOKENS.fullmatch(name):
            if type(value) is int and value >= SPECIAL:
                _put(part, name, specials.setdefault(value, SPECIAL + len(specials) % (WORDS - SPECIAL)))
            elif isinstance(value, list) and all(type(one) is int for one in value):
                small = [specials.setdefault(v, SPECIAL + len(specials)) if v >= SPECIAL else v for v in value]
                _put(part, name, small)


def _fewer_experts(part: Any) -> None:
    if any(EXPERTS.fullmatch(name) for name in vars(part)):
        part._experts_implementation = "eager"  # the grouped products want widths that small models have not
    few = {
        **{name: 4 for name in vars(part) if EXPERTS.fullmatch(name)},
        **{name: 2 for name in vars(part) if CHOSEN.fullmatch(name)},
        **{name: 1 for name in ("n_group", "topk_group", "num_expert_group", "n_expert_groups") if name in vars(part)},
    }
    for name, most in few.items():
        if type(vars(part)[name]) is int and vars(part)[name] > most:
            setattr(part, name, most)
