"""Models whose own `attentions` are not what ran, or are not all: beside the formula by hand."""

import math
import os
import warnings

import pytest
import torch

import clearhead as ch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import IDS, MODELS, OWN_EAGER, made  # noqa: E402


@pytest.mark.parametrize("padded", ["none", "right", "left", "holes"])
def test_falcon_adds_alibi_once_on_sdpa(padded):
    """Its eager code adds it to the mask, and to the scores once more: there the model's outputs are others too."""
    words = {"right": [1] * 7 + [0] * 3, "left": [0] * 4 + [1] * 6, "holes": [1, 1, 0, 1, 1, 1, 0, 1, 1, 1]}
    mask = torch.tensor([[1] * 10, words.get(padded, [1] * 10)])
    ids = torch.randint(3, 90, (2, 10), generator=torch.Generator().manual_seed(0))
    size = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = made("Falcon", times=3, **size, alibi=True, attn_implementation="sdpa")
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        model(ids, attention_mask=mask)
    for call in seen.calls:
        slopes = torch.tensor([2.0 ** (-2 * (head + 1)) for head in range(4)]).view(1, 4, 1, 1)
        places = (mask.cumsum(-1) - 1) * mask
        alibi = slopes * places[:, None, None] / math.sqrt(8)
        scores = call.query @ call.key.repeat_interleave(4 // call.key.shape[1], 1).mT / math.sqrt(8) + alibi
        allowed = torch.ones(10, 10, dtype=torch.bool).tril() & mask.bool()[:, None, None]
        wanted = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
        rows = allowed.any(-1).expand(2, 4, 10)
        torch.testing.assert_close(call.weights.dense()[rows], wanted[rows], rtol=1e-4, atol=2e-3)  # slopes in bfloat16
        torch.testing.assert_close((call.weights @ call.value)[rows], call.output[rows], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("name", ["Bert", "Gemma2"])
def test_eager_attention_adds_a_mask_of_four_dimensions_whatever_its_dtype(name, dtype):
    """A bool mask hides nothing there: True is 1."""
    model = made(name, times=8, attn_implementation="eager", **{**MODELS, **OWN_EAGER}[name])
    mask = (torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.6).to(dtype)
    with torch.no_grad():
        own = model(IDS, attention_mask=mask, output_attentions=True).attentions
        with ch.watch(model) as seen:
            model(IDS, attention_mask=mask)
    assert not seen.missing
    for call, weights in zip(seen.calls, own, strict=True):
        torch.testing.assert_close(call.weights.dense(), weights, rtol=1e-4, atol=1e-5)


def test_wavlm_returns_the_mean_over_heads():
    model = made(
        "WavLM", times=3, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        conv_dim=(16, 16), conv_kernel=(10, 8), conv_stride=(5, 4), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2, num_buckets=32, max_bucket_distance=40,
    )  # fmt: skip
    x = torch.randn(2, 600, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), ch.watch(model) as seen:
        returned = model(x, output_attentions=True).attentions
    for call, own in zip(seen.calls, returned, strict=True):
        assert torch.equal(own[:, 0], own[:, 3])
        torch.testing.assert_close(call.weights.dense().mean(1), own[:, 0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_swin_returns_one_block_of_each_stage(implementation):
    size = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
    model, own = made("Swin", times=3, **size), []
    model.set_attn_implementation("eager")
    for module in model.modules():
        if type(module).__name__ == "SwinAttention":
            module.register_forward_hook(lambda module, args, output: own.append(output[1]))
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(pixels, output_attentions=True)
        blocks = list(own)
        model.set_attn_implementation(implementation)
        with ch.watch(model) as seen:
            model(pixels)
    assert len(blocks) == 4  # two of them shifted
    for call, weights in zip(seen.calls, blocks, strict=True):
        torch.testing.assert_close(call.weights.dense(), weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["local", "transient-global"])
def test_attention_in_a_modules_own_code_is_told_of(kind):
    size = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    model = made("LongT5", times=3, **size, local_radius=4, global_block_size=4, encoder_attention_type=kind)
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    said = pytest.warns(UserWarning, match="LocalSelfAttention|GlobalSelfAttention")
    with torch.no_grad(), said as told, ch.watch(model) as seen:
        model(input_ids=ids, decoder_input_ids=ids[:, :5])
    assert len(seen.calls) == 4 and "LongT5" in str(told[0].message)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with ch.watch(model, layers="decoder.*"):
            model(input_ids=ids, decoder_input_ids=ids[:, :5])
