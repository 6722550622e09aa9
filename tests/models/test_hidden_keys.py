"""Keys that a model's own mask hides from every query are padding, however the model was given its mask."""

import os

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import GROUPED, IDS, RIGHT, SIZES, SMALL, made  # noqa: E402


def half(*shape, dim=0):
    """Two masks: of the second sequence the last half along `dim` is padding."""
    mask = torch.ones(2, *shape)
    mask[1].narrow(dim, shape[dim] // 2, shape[dim] - shape[dim] // 2).zero_()
    return mask


AUDIO = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
AUDIO |= {"conv_dim": (16, 16, 16), "conv_stride": (5, 4, 4), "conv_kernel": (10, 8, 4), "num_conv_pos_embeddings": 4}
AUDIO |= {"num_conv_pos_embedding_groups": 2, "vocab_size": 30, "feat_extract_norm": "layer"}
SEQ2SEQ = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
SEQ2SEQ |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 99}
SPEECH = {"input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 200, "max_target_positions": 64}
MOONSHINE = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "encoder_num_hidden_layers": 1}
MOONSHINE |= {"decoder_num_hidden_layers": 1, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4}
IMAGE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
IMAGES = {**IMAGE, "image_size": 32, "patch_size": 8}
PATCHES = {**IMAGE, "num_patches": 16, "patch_size": 4}
SOUND = {"input_values": torch.randn(2, 8000), "attention_mask": half(8000).long()}
DECODED = {"decoder_input_ids": IDS[:, :4]}
FEATURES = {"input_features": torch.randn(2, 64, 8), "attention_mask": half(64).long()}
CASES = {
    "Wav2Vec2": ("Wav2Vec2Model", "Wav2Vec2Config", AUDIO, SOUND),
    "SEW": ("SEWModel", "SEWConfig", AUDIO, SOUND),
    "Speech2Text": ("Speech2TextModel", "Speech2TextConfig", {**SEQ2SEQ, **SPEECH}, {**FEATURES, **DECODED}),
    "Moonshine": ("MoonshineModel", "MoonshineConfig", MOONSHINE, {**SOUND, **DECODED}),
    "Idefics3": (
        *("Idefics3VisionTransformer", "Idefics3VisionConfig", IMAGES),
        {"pixel_values": torch.randn(2, 3, 32, 32), "patch_attention_mask": half(4, 4).bool()},
    ),
    "Idefics3, columns": (
        *("Idefics3VisionTransformer", "Idefics3VisionConfig", IMAGES),
        {"pixel_values": torch.randn(2, 3, 32, 32), "patch_attention_mask": half(4, 4, dim=1).bool()},
    ),
    "SigLIP 2": (
        *("Siglip2VisionModel", "Siglip2VisionConfig", PATCHES),
        {"pixel_values": torch.randn(2, 16, 48), "pixel_attention_mask": half(16).long()}
        | {"spatial_shapes": torch.tensor([[4, 4], [2, 4]])},
    ),
}


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("name", CASES)
def test_statistics_are_those_of_what_the_model_does_not_hide(name, backend):
    cls, config, sizes, inputs = CASES[name]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**sizes, attn_implementation=backend)).eval()
    for p in model.parameters():
        if p.dim() > 1:
            p.data.normal_(0, 0.3)
    means = ch.models.Means()
    with torch.no_grad():
        with ch.watch(model) as seen:
            model(**inputs)
        with ch.models.statistics(model, [ch.reductions.Entropy()], merge=means):
            model(**inputs)
    assert any(call.padding is not None for call in seen)
    for call in seen:
        weights = call.weights.dense().double()
        words = weights.amax((1, 2)) > 0
        queries = words if call.kind == "self" else torch.ones(weights.shape[0], weights.shape[2], dtype=torch.bool)
        keys = call.padding.keys if call.padding else None
        assert words.all() if keys is None else torch.equal(keys, words), call
        rows = torch.special.entr(weights).sum(-1)
        right = (rows * queries[:, None]).sum((0, 2)) / queries.sum()
        torch.testing.assert_close(means[call.name][0], right, atol=1e-5, rtol=0)


class Direct(torch.nn.Module):
    def forward(self, x, keep):
        return F.scaled_dot_product_attention(x, x, x, attn_mask=keep)


def square(words, rule):
    """The mask (B, 1, L, L) of a rule of positions that also hides padding."""
    i, j = torch.arange(words.shape[1])[:, None], torch.arange(words.shape[1])
    return rule(i, j) & words[:, None, None]


STRUCTURES = {
    "all": lambda i, j: (i == i) & (j == j),
    "causal": lambda i, j: i >= j,
    "window": lambda i, j: (i >= j) & (i - j < 3),
    "window on both sides": lambda i, j: (i - j).abs() < 3,
    "documents": lambda i, j: i // 4 == j // 4,
    "prefix": lambda i, j: (i >= j) | (j < 3),
}


@pytest.mark.parametrize("additive", [None, -torch.inf, torch.finfo(torch.float32).min, -1e9, -1e4])
@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("seed", range(4))
def test_any_structure_and_any_padding(name, additive, seed):
    torch.manual_seed(seed)
    count = torch.randint(1, 12, (3, 1))
    place = torch.arange(12)
    words = (place < count, place >= 12 - count, torch.rand(3, 12) < 0.7, torch.ones(3, 12, dtype=torch.bool))[seed]
    keep = square(words, STRUCTURES[name])
    mask = keep if additive is None else torch.zeros(keep.shape).masked_fill(~keep, additive)
    with ch.watch(model := Direct()) as seen:
        model(torch.randn(3, 2, 12, 4), mask)
    padding = seen[0].padding
    assert words.all() if padding is None else torch.equal(padding.keys, words) and torch.equal(padding.queries, words)


def unselected(seed, heads=1):
    """Causal rows that see a few keys each, as an indexer chooses them."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(2, heads, 12, 12, generator=generator).argsort(-1)
    return (order < 3).tril()


HEADS = torch.stack([torch.tensor([[[1] * 9]]), torch.tensor([[[1] * 5 + [0] * 4]])], 1).bool().expand(2, 2, 9, 9)
NOT_PADDING = {
    "strictly causal": torch.ones(2, 1, 9, 9).tril(-1).bool(),
    "heads that differ": HEADS,
    **{f"unselected keys {seed}": unselected(seed) for seed in range(6)},
}


@pytest.mark.parametrize("name", NOT_PADDING)
def test_what_is_not_padding(name):
    keep = NOT_PADDING[name]
    with ch.watch(model := Direct()) as seen:
        model(torch.randn(2, 2, keep.shape[2], 4), keep)
    assert seen[0].padding is None


def test_empty_slots_and_old_keys_of_a_cache_are_not_padding():
    model = made("Llama", "ForCausalLM", **SIZES)
    static = transformers.StaticCache(model.config, max_cache_len=12)
    with torch.no_grad(), ch.watch(model) as seen:
        for start, stop in ((0, 5), (5, 6)):
            model(input_ids=IDS[:, start:stop], past_key_values=static)
    assert all(call.padding is None for call in seen)
    model = made("Mistral", "ForCausalLM", **SMALL, **GROUPED, sliding_window=4)
    with torch.no_grad(), ch.watch(model) as seen:
        cache = transformers.DynamicCache()
        for start, stop in ((0, 6), (6, 8), (8, 9)):
            model(input_ids=IDS[:, start:stop], past_key_values=cache)
    assert all(call.padding is None for call in seen)


class Reading(torch.nn.Module):
    def forward(self, x, encoder_hidden_states, keep):
        y = encoder_hidden_states
        return F.scaled_dot_product_attention(x, y, y, attn_mask=keep)


def test_cross_attention_of_few_queries():
    """Every query sees the same keys of its source, in a step of a generation too; a mask by query shows no padding."""
    for queries in (1, 4, 12):
        with ch.watch(model := Reading()) as seen:
            model(torch.randn(2, 2, queries, 4), torch.randn(2, 2, 9, 4), RIGHT.bool()[:, None, None])
        assert torch.equal(seen[0].padding.keys, RIGHT.bool()) and seen[0].padding.queries is None
    with ch.watch(model := Reading()) as seen:
        model(torch.randn(2, 2, 4, 4), torch.randn(2, 2, 9, 4), torch.ones(4, 9).tril(2).bool())
    assert seen[0].kind == "cross" and seen[0].padding is None
