"""Backends that take their masks in other forms than a matrix, and those that cannot be recorded."""

import os

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import clearhead as ch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")

from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask  # noqa: E402

IDS = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))
RIGHT = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
FAKE = "flash_for_tests"  # the mask of FlashAttention, without its kernels


def attention(module, query, key, value, attention_mask, scaling, sliding_window=None, **options):
    """What FlashAttention computes: the last query at the last key, padding taken out."""
    filled = key.shape[2] if attention_mask is None else attention_mask.shape[1]
    key, value = (t[:, :, :filled].repeat_interleave(module.num_key_value_groups, 1) for t in (key, value))
    place = torch.arange(filled)
    own = place[-query.shape[2] :, None]
    keep = place <= own
    if sliding_window is not None:
        keep = keep & (place > own - sliding_window)
    if attention_mask is not None:
        keep = keep & attention_mask[:, None, None].bool()
    scores = (query @ key.mT * scaling).masked_fill(~keep, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0) @ value).transpose(1, 2), None


@pytest.fixture
def flash(monkeypatch):
    functions = transformers.modeling_utils.AttentionInterface._global_mapping
    monkeypatch.setitem(functions, FAKE, attention)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, FAKE, flash_attention_mask)


def models(implementation, window=4):
    config = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": window,
        "pad_token_id": 0,
        "eos_token_id": None,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    slow = transformers.MistralForCausalLM(transformers.MistralConfig(**config, attn_implementation="eager")).eval()
    fast = transformers.MistralForCausalLM(transformers.MistralConfig(**config)).eval()
    fast.load_state_dict(slow.state_dict())
    fast.config._attn_implementation = implementation
    return fast, slow


@pytest.mark.parametrize("mask", [None, RIGHT, RIGHT.flip(1)], ids=["no padding", "right", "left"])
def test_the_masks_of_flash_attention(flash, mask):
    fast, slow = models(FAKE)
    inputs = {"input_ids": IDS, "attention_mask": mask}
    with torch.no_grad():
        plain = fast(**inputs).logits
        with ch.watch(fast) as seen:
            watched = fast(**inputs).logits
        own = slow(**inputs, output_attentions=True)
    assert torch.equal(plain, watched) and {call.backend for call in seen.calls} == {FAKE}
    tokens = (torch.ones_like(IDS) if mask is None else mask).bool()
    torch.testing.assert_close(plain[tokens], own.logits[tokens], atol=1e-4, rtol=0)
    for call, weights in zip(seen.calls, own.attentions, strict=True):
        rows = tokens[:, None].expand(weights.shape[:3])
        recorded = call.weights.dense()
        torch.testing.assert_close(recorded[rows], weights[rows], atol=1e-5, rtol=0)
        assert mask is None or (recorded[~rows] == 0).all()


@pytest.mark.parametrize("window", [4, None])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_flash_attention_with_a_cache(flash, cache, window):
    fast, slow = models(FAKE, window)
    options = {"attention_mask": RIGHT.flip(1), "max_new_tokens": 3, "do_sample": False}
    options |= {"return_dict_in_generate": True, "cache_implementation": cache}
    with ch.watch(fast) as seen:
        got = fast.generate(IDS, **options)
    own = slow.generate(IDS, output_attentions=True, **options)
    assert torch.equal(got.sequences, own.sequences)
    weights = [layer for step in own.attentions for layer in step]
    for call, want in zip(seen.calls, weights, strict=True):
        recorded = call.weights.dense()
        sees, keys = recorded.sum(-1) > 0, recorded.shape[-1]
        real = RIGHT.flip(1).bool() if call.query.shape[2] == 9 else torch.ones(2, 1, dtype=torch.bool)
        assert torch.equal(sees, real[:, None].expand(sees.shape))
        assert (want[sees][:, keys:] == 0).all()
        torch.testing.assert_close(recorded[sees], want[sees][:, :keys], atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [4, None])
def test_flash_attention_on_what_comes_after_a_first_part(flash, window):
    fast, slow = models(FAKE, window)
    inputs = {"input_ids": IDS[:, 5:], "past_key_values": None}
    with torch.no_grad(), ch.watch(fast) as seen:
        fast(**{**inputs, "past_key_values": fast(input_ids=IDS[:, :5]).past_key_values})
        past = slow(input_ids=IDS[:, :5]).past_key_values
        own = slow(**{**inputs, "past_key_values": past}, output_attentions=True).attentions
    for call, weights in zip(seen.calls[2:], own, strict=True):
        recorded = call.weights.dense()
        assert recorded.shape[2] == 4
        torch.testing.assert_close(recorded, weights[..., -recorded.shape[-1] :], atol=1e-5, rtol=0)


def test_packed_sequences_on_flash_attention_are_refused(flash):
    fast, _ = models(FAKE)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with pytest.raises(ch.UnsupportedError, match="packed into one"), ch.watch(fast), torch.no_grad():
        fast(input_ids=IDS[:1], position_ids=positions)


def test_what_is_no_tensor_is_refused(monkeypatch):
    monkeypatch.setitem(transformers.modeling_utils.AttentionInterface._global_mapping, FAKE, attention)
    fast, _ = models(FAKE)
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 9, 9, device="cpu")
    layer = fast.model.layers[0].self_attn
    hidden = torch.zeros(1, 9, 32)
    rotary = fast.model.rotary_emb(hidden, torch.arange(9)[None])
    said = r"layers\.0\.self_attn was called on the backend(.|\n)*BlockMask(.|\n)*attn_implementation='sdpa'"
    with pytest.raises(ch.UnsupportedError, match=said), ch.watch(fast):
        layer(hidden, position_embeddings=rotary, attention_mask=block_mask)
