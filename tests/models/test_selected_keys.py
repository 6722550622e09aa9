"""Models whose indexer chooses the keys of each query: on backends that are handed the choice beside the mask."""

import os

import pytest
import torch

import clearhead as ch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")

from transformers.masking_utils import AttentionMaskInterface, sdpa_mask  # noqa: E402

IDS = torch.randint(3, 100, (2, 24), generator=torch.Generator().manual_seed(0))
RIGHT = torch.tensor([[1] * 24, [1] * 15 + [0] * 9])
OWN = "own_for_tests"

SMALL = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 4, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 1, "n_shared_experts": 1, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
INDEXED = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
DEEPSEEK = {**SMALL, **EXPERTS, **LATENT, **INDEXED, "n_group": 1, "topk_group": 1, "head_dim": 4}
MINIMAX = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4, "num_local_experts": 4}
MINIMAX |= {"num_experts_per_tok": 1, "dense_intermediate_size": 32, "shared_intermediate_size": 16}
MINIMAX |= {"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2}
MINIMAX |= {"layer_types": ["minimax_m3_sparse"] * 2}
MODELS = {
    "DeepseekV32Model": ("DeepseekV32Config", DEEPSEEK),
    "GlmMoeDsaModel": ("GlmMoeDsaConfig", DEEPSEEK),
    "AXK2Model": ("AXK2Config", DEEPSEEK),
    "HYV4Model": ("HYV4Config", DEEPSEEK),
    "Dots3NoteTextModel": ("Dots3NoteTextConfig", DEEPSEEK),
    "MiniMaxM3VLTextModel": ("MiniMaxM3VLTextConfig", MINIMAX),
}
NO_SINKS = [("HYV4Model", OWN), ("HYV4Model", "sdpa")]  # these two backends leave the sinks of this model out


def model(name, backend):
    config, options = MODELS[name]
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    made = kind(getattr(transformers, config)(**options, attn_implementation="eager")).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim > 1:
                weight *= 8  # else every row is nearly uniform, and a key too many would not be seen
        for name, weight in made.named_parameters():
            if "sink" in name:  # transformers leaves these as memory was
                weight.copy_(torch.linspace(-1, 1, weight.numel()).view_as(weight))
    if backend == "clearhead":
        return ch.models.run_on_clearhead(made)
    made.config._attn_implementation = backend
    return made


def attend(module, query, key, value, attention_mask, scaling, indices=None, block_indices=None, **options):
    """A backend that reads the choice itself."""
    if block_indices is not None:
        positions = options.get("position_ids")
        positions = positions.expand(query.shape[0], -1)
        build = module.indexer.build_block_mask
        added = build(block_indices, attention_mask, key.shape[2], query.dtype, query.device, positions)
    else:
        chosen = torch.zeros(query.shape[0], 1, query.shape[2], key.shape[2], dtype=torch.bool)
        chosen.scatter_(-1, indices.long()[:, None], True)
        added = torch.zeros_like(chosen, dtype=query.dtype).masked_fill(~(chosen & attention_mask), -torch.inf)
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    weights = (query @ key.mT * scaling + added).softmax(-1).nan_to_num(0)
    return (weights @ value).transpose(1, 2), None


@pytest.fixture
def own(monkeypatch):
    monkeypatch.setitem(transformers.modeling_utils.AttentionInterface._global_mapping, OWN, attend)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, OWN, sdpa_mask)


CASES = [(name, backend) for name in MODELS for backend in ("clearhead", OWN, "sdpa", "eager")]


@pytest.mark.parametrize("mask", [None, RIGHT], ids=["whole", "right padding"])
@pytest.mark.parametrize(("name", "backend"), [case for case in CASES if case not in NO_SINKS])
def test_the_chosen_keys_alone(name, backend, mask, own):
    inputs = {"input_ids": IDS, "attention_mask": mask}
    tokens = torch.ones_like(IDS).bool() if mask is None else mask.bool()
    with torch.no_grad():
        eager = model(name, "eager")(**inputs, output_attentions=True)
        fast = model(name, backend)
        plain = fast(**inputs)[0]
        with ch.watch(fast) as seen:
            watched = fast(**inputs)[0]
    assert torch.equal(plain, watched)
    torch.testing.assert_close(plain[tokens], eager[0][tokens], atol=1e-4, rtol=0)
    rows = tokens[:, None].expand(2, 4, 24)
    assert len(seen.calls) == len(eager.attentions) == 2
    for call, weights in zip(seen.calls, eager.attentions, strict=True):
        assert (weights[:, :, 12:15] == 0).any(-1).all(), "nothing was left out"
        assert call.backend == backend
        torch.testing.assert_close(call.weights.dense()[rows], weights[rows], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_with_a_cache(name):
    fast, eager = model(name, "clearhead"), model(name, "eager")
    with torch.no_grad():
        outputs = []
        for one in (fast, eager):
            past = one(input_ids=IDS[:, :20], use_cache=True).past_key_values
            outputs.append(one(input_ids=IDS[:, 20:21], past_key_values=past)[0])
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=0)
