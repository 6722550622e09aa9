"""Calls of PyTorch's flex_attention: of modules themselves, and of transformers' backend."""

import random

import pytest
import torch
import torch.nn.attention.flex_attention as flex
import transformers
from small_models import IDS, MODELS, PADDINGS, made
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import clearhead as ch

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
LABELS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2])
MASKS = {
    "none": None,
    "causal": lambda b, h, i, j: i >= j,
    "documents": lambda b, h, i, j: (LABELS[i] == LABELS[j]) & (i >= j),
    "by head": lambda b, h, i, j: (i + h >= j) & ((i - j) % (h + 2) != 1),
    "by sequence": lambda b, h, i, j: j <= 5 + 3 * b,
}
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
CHANGES = {
    "none": None,
    "alibi": lambda s, b, h, i, j: s + SLOPES[h] * (j - i),
    "softcap": lambda s, b, h, i, j: 2 * torch.tanh(s / 2),
    "by pair": lambda s, b, h, i, j: torch.where((i + j) % 3 == b, s * 2, s),
}


class Flex(nn.Module):
    def __init__(self, change=None, mask=None, **options):
        super().__init__()
        self.change, self.mask, self.options = change, mask, options

    def forward(self, q, k, v):
        return flex_attention(q, k, v, self.change, self.mask, **self.options)


def block(name, queries=12, keys=12):
    rule = MASKS[name]
    return None if rule is None else create_block_mask(rule, 2, 4, queries, keys, device="cpu")


def tensors(seed, kv_heads=4, queries=12, keys=12):
    g = torch.Generator().manual_seed(seed)
    sizes = (4, queries), (kv_heads, keys), (kv_heads, keys)
    return [torch.randn(2, heads, length, 8, generator=g) for heads, length in sizes]


@pytest.mark.parametrize("seed", range(12))
def test_a_call_of_ones_own_is_recorded(seed):
    dice = random.Random(seed)
    mask, change = block(dice.choice([*MASKS])), CHANGES[dice.choice([*CHANGES])]
    kv_heads = dice.choice([4, 2])
    options = {"scale": 0.5} if dice.random() < 0.5 else {}
    model = Flex(change, mask, enable_gqa=kv_heads == 2, **options)
    q, k, v = tensors(seed, kv_heads)
    plain = model(q, k, v)
    with ch.watch(model, values=True) as seen:
        assert torch.equal(model(q, k, v), plain)
    (call,) = seen.calls
    assert call.backend == "flex_attention" and call.shape == (2, 4, 12, 12)
    torch.testing.assert_close(call.weights @ v, plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(call.output, plain)


def test_other_results_edits_and_statistics():
    q, k, v = tensors(0)
    model = Flex(CHANGES["alibi"], block("documents"), return_lse=True)
    cut = ch.edits.Knockout(queries=6, keys=3)
    with ch.watch(model) as seen, pytest.warns(FutureWarning, match="return_lse"):
        output, lse = model(q, k, v)
    torch.testing.assert_close(seen[0].weights.logsumexp(), lse.detach(), atol=1e-5, rtol=0)
    with torch.no_grad(), ch.edit(model, cut), ch.watch(model) as seen:
        edited, _ = model(q, k, v)
    torch.testing.assert_close(seen[0].weights @ v, edited, atol=1e-5, rtol=0)
    assert (seen[0].weights[:, :, 6, 3] == 0).all() and not torch.allclose(edited, output)
    entropy = ch.reductions.Entropy()
    with ch.models.statistics(model, entropy) as found, torch.no_grad():
        model(q, k, v)
    assert found[0].results[0].shape == (2, 4, 12)


def test_calls_of_two_models_and_restored_functions():
    q, k, v = tensors(0)
    before = flex.setup_compilation_env, torch.compile
    one, other = Flex(), Flex()
    with ch.watch(one) as first, ch.watch(other) as second:
        one(q, k, v), other(q, k, v), flex_attention(q, k, v)
    assert len(first.calls) == len(second.calls) == 1
    assert (flex.setup_compilation_env, torch.compile) == before


def test_a_mask_of_blocks_without_a_rule_that_is_known():
    """Uncompiled flex_attention reads the rule alone, and so does the record."""
    every = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(*every, BLOCK_SIZE=12, seq_lengths=(12, 12))
    q, k, v = tensors(0)
    model = Flex(None, mask)
    with ch.watch(model) as seen:
        output = model(q, k, v)
    torch.testing.assert_close(seen[0].weights @ v, output, atol=1e-5, rtol=0)


@pytest.fixture
def uncompiled(monkeypatch):
    """The same function of transformers, not compiled: that takes half a minute."""
    from transformers.integrations import flex_attention as integration

    def attend(*args, training, **kwargs):
        return integration.flex_attention(*args, **kwargs)

    monkeypatch.setattr(integration, "compile_friendly_flex_attention", attend)
    create = transformers.masking_utils.create_block_mask
    monkeypatch.setattr(
        transformers.masking_utils, "create_block_mask", lambda *a, **k: create(*a, **{**k, "_compile": False})
    )


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Bert"])
def test_a_model_of_transformers(name, padding, uncompiled):
    model = made(name, times=8, **MODELS[name], attn_implementation="flex_attention")
    given = {"input_ids": IDS, "attention_mask": PADDINGS[padding]}
    with torch.no_grad():
        plain = model(**given)[0]
        with ch.watch(model) as seen:
            assert torch.equal(model(**given)[0], plain)
        model.set_attn_implementation("sdpa")
        with ch.watch(model) as right:
            model(**given)
    for call, other in zip(seen, right, strict=True):
        assert call.backend == "flex_attention"
        rows = slice(None) if call.padding is None else call.padding.queries[:, None].expand(-1, 4, -1)
        torch.testing.assert_close(call.weights.dense()[rows], other.weights.dense()[rows], atol=1e-5, rtol=1e-4)
        assert (call.padding is None) == (other.padding is None)


def test_a_generation_with_a_cache(uncompiled):
    model = made("Llama", "ForCausalLM", times=4, **MODELS["Llama"], attn_implementation="flex_attention")
    given = {"max_new_tokens": 3, "do_sample": False}
    with torch.no_grad(), ch.watch(model) as seen:
        ids = model.generate(IDS[:1], **given)
    with torch.no_grad(), ch.watch(model) as whole:
        model(ids[:, :-1])
    for name in seen.names:
        joined = seen[name].joined()
        torch.testing.assert_close(joined.dense(), whole[name][0].weights.dense(), atol=1e-5, rtol=1e-4)


def test_checks_of_masks_and_backends(uncompiled):
    model = made("Llama", times=8, **MODELS["Llama"], attn_implementation="flex_attention")
    positions = torch.cat([torch.arange(4), torch.arange(5)])[None]
    packed = ch.Causal() & ch.Documents.from_lengths([4, 5])
    batch = {"input_ids": IDS[:1], "position_ids": positions, "use_cache": False}
    assert ch.audit(model, batch, packed).ok
    assert not ch.audit(model, batch, ch.Causal() & ch.Documents.from_lengths([3, 6]), level="outputs").ok
