"""Small random models of transformers on two backends, and inputs for them."""

import copy

import torch
import transformers

IDS = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))
RIGHT = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
PADDINGS = {"no padding": None, "right padding": RIGHT, "left padding": RIGHT.flip(1)}
SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SMALL = {**SIZES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
SEQ2SEQ_SIZES = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
SEQ2SEQ = {**SEQ2SEQ_SIZES, "vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SEQ2SEQ |= {"decoder_start_token_id": 2}
T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
WINDOW = {"sliding_window": 4}
MODELS = {
    "Bert": SMALL,
    "Llama": {**SMALL, "num_key_value_heads": 2},
    "Mistral": {**SMALL, **GROUPED, **WINDOW},
    "Qwen3": {**SMALL, **GROUPED},
    "Gemma3Text": {**SMALL, **GROUPED, **WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "GPTNeoX": SMALL,
    "GPT2": {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "Roberta": {**SMALL, "pad_token_id": 1},
    "ModernBert": {
        **SMALL,
        "global_attn_every_n_layers": 2,
        "local_attention": 4,
        "cls_token_id": 3,
        "sep_token_id": 4,
    },
    "DeepseekV3": {
        **SMALL,
        **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4},
        **{"qk_nope_head_dim": 8, "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
        **{"topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    },
    "T5": {**T5, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0},
    "Bart": SEQ2SEQ,
    "Whisper": {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 6, "max_target_positions": 16},
    "ViT": {**{name: size for name, size in SMALL.items() if name != "vocab_size"}, "image_size": 16, "patch_size": 4},
}
OWN_EAGER = {  # transformers runs these on no SDPA
    "Gemma2": {**SMALL, **GROUPED, **WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "GptOss": {**SMALL, **GROUPED, **WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
}
KEYS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")


def made(name, head="Model", times=1, **options):
    """A random model of transformers, the same each time; its matrices `times` as large as it draws them."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options)
    return larger(getattr(transformers, f"{name}{head}")(config).eval(), times)


def larger(model, times):
    """The model with larger matrices: else every row is nearly uniform, and a wrong one would not be seen."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight *= times
    return model


def pair(name, options, head="Model", times=None):
    """The model on the backend it takes by itself, and on eager, with the same weights."""
    fast = made(name, head, times or (1 if name == "T5" else 10), **options)
    slow = type(fast)(type(fast.config)(**{**options, "attn_implementation": "eager"})).eval()
    slow.load_state_dict(fast.state_dict())
    return fast, slow


def inputs_of(name, mask=None):
    if name == "ViT":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))}
    if name == "Whisper":
        features = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(1))
        return {"input_features": features, "decoder_input_ids": IDS[:, :5]}
    given = {"input_ids": IDS} | ({} if mask is None else {"attention_mask": mask})
    return given | ({"decoder_input_ids": IDS[:, :5]} if name in ("Bart", "T5") else {})


def own_attentions(output):
    return {key: output[key] for key in KEYS if output.get(key)}  # BERT has an empty tuple of cross attentions


def in_order(output):
    """The weights of an output, in the order of the calls."""
    if getattr(output, "encoder_attentions", None) is None:
        return list(output.attentions)
    pairs = zip(output.decoder_attentions, output.cross_attentions, strict=True)
    return [*output.encoder_attentions, *(weights for pair in pairs for weights in pair)]


def perturbed(model, by):
    """A copy whose weights are each moved by a normal number, times `by`."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            weight += by * torch.randn(weight.shape, generator=generator)
    return other


def tensors(output):
    return {key: value for key, value in output.items() if isinstance(value, torch.Tensor)}


def flat(output):
    """All the weights of an output, of generate() too."""
    return [
        layer
        for layers in own_attentions(output).values()
        for step in layers
        for layer in (step if isinstance(step, tuple) else (step,))
    ]


def takes_a_mask(name):
    return name not in ("ViT", "Whisper")
