"""Watching generate(): one record a step and layer, with a cache that grows and with one that is written over."""

import os

import pytest
import torch

import clearhead as ch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")

from small_models import SIZES  # noqa: E402

IDS = torch.randint(3, 100, (2, 5), generator=torch.Generator().manual_seed(0))
LEFT = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
STEPS = 4


def models():
    torch.manual_seed(0)
    config = {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": None, "initializer_range": 0.3}
    make = transformers.LlamaForCausalLM
    fast = make(transformers.LlamaConfig(**config)).eval()
    slow = make(transformers.LlamaConfig(**config, attn_implementation="eager")).eval()
    slow.load_state_dict(fast.state_dict())
    return fast, slow


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("mask", [None, LEFT], ids=["no padding", "left padding"])
def test_generate(cache, mask):
    fast, slow = models()
    options = {"max_new_tokens": STEPS, "do_sample": False, "cache_implementation": cache}
    options |= {"attention_mask": torch.ones_like(IDS) if mask is None else mask, "return_dict_in_generate": True}
    plain = fast.generate(IDS, output_logits=True, **options)
    with ch.watch(fast) as seen:
        watched = fast.generate(IDS, output_logits=True, **options)
    assert torch.equal(plain.sequences, watched.sequences)
    assert all(torch.equal(a, b) for a, b in zip(plain.logits, watched.logits, strict=True))
    own = slow.generate(IDS, output_attentions=True, **options)
    assert torch.equal(own.sequences, plain.sequences)
    weights = [layer for step in own.attentions for layer in step]
    assert len(seen.calls) == len(weights) == 2 * STEPS
    assert [call.name for call in seen.calls] == ["model.layers.0.self_attn", "model.layers.1.self_attn"] * STEPS
    for call, want in zip(seen.calls, weights, strict=True):
        recorded = call.weights.dense()
        sees = recorded.sum(-1) > 0  # a padding query of the first step does not
        assert sees[:, :, -1].all()
        torch.testing.assert_close(recorded[sees], want[sees], atol=1e-5, rtol=0)
    first, *later = seen["model.layers.1.self_attn"]
    assert first.query.shape[2] == 5 and all(call.query.shape[2] == 1 for call in later)
    lengths = [call.key.shape[2] for call in (first, *later)]
    assert lengths == ([5, 6, 7, 8] if cache == "dynamic" else [lengths[0]] * STEPS)
    if cache == "static":
        # the buffer was empty beyond what each step had filled: the records were copied in time
        filled = [int((call.key[0, 0].abs().sum(-1) > 0).sum()) for call in (first, *later)]
        assert filled == [5, 6, 7, 8] and lengths[0] > 5


def test_a_step_with_a_static_cache_is_drawn_by_the_report(tmp_path):
    fast, _ = models()
    with ch.watch(fast) as seen:
        fast.generate(IDS, max_new_tokens=2, do_sample=False, cache_implementation="static")
    assert "model.layers.0.self_attn" in seen.view().write(tmp_path / "page.html").read_text(encoding="utf-8")
