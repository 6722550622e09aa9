"""One small random model of each family: what is recorded equals the model's own eager attentions."""

import os

import pytest
import torch

import clearhead as ch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import GROUPED, IDS, PADDINGS, SEQ2SEQ_SIZES, SIZES, in_order, pair  # noqa: E402

# class, options, the backend it runs on by default
TEXT = {
    "Mistral": ({**GROUPED, "sliding_window": 4}, "sdpa"),
    "Qwen3": (GROUPED, "sdpa"),
    "Gemma2": ({**GROUPED, "sliding_window": 4, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}, "eager"),
    "Gemma3Text": ({**GROUPED, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}, "sdpa"),
    "GptOss": ({**GROUPED, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1}, "eager"),
    "GPTNeoX": ({}, "sdpa"),
    "Roberta": ({"pad_token_id": 1}, "sdpa"),
    "ModernBert": (
        {"global_attn_every_n_layers": 2, "local_attention": 4}
        | {f"{name}_token_id": i for i, name in enumerate(("pad", "bos", "eos", "cls", "sep"))},
        "sdpa",
    ),
    "DeepseekV3": (
        {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
        | {"v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        | {"moe_intermediate_size": 16, "first_k_dense_replace": 1},
        "sdpa",
    ),
    "Bart": (SEQ2SEQ_SIZES, "sdpa"),
}


def check(fast, slow, inputs, padding=None):
    """Outputs equal, and each record of both within 1e-5 of the model's own. Gives the calls on the fast backend."""
    with torch.no_grad():
        plain = fast(**inputs)
        with ch.watch(fast) as seen:
            watched = fast(**inputs)
        own = in_order(slow(**inputs, output_attentions=True))
        with ch.watch(slow) as seen_slow:
            slow(**inputs)
    assert torch.equal(plain[0], watched[0]), "watching changed the output"
    assert len(seen.calls) == len(seen_slow.calls) == len(own) > 0
    assert all((weights.amax(-1) > 1.5 / weights.shape[-1]).any() for weights in own), "rows too uniform to tell"
    for call, eager, weights in zip(seen.calls, seen_slow.calls, own, strict=True):
        assert call.name == eager.name and eager.backend == "eager"
        torch.testing.assert_close(eager.weights.dense(), weights, atol=1e-5, rtol=0)
        recorded = call.weights.dense()
        # SDPA gives a query that sees nothing 0, eager a uniform row: from the next layer on padding differs
        tokens = torch.ones(recorded.shape[:3], dtype=torch.bool)
        if padding is not None and padding.shape[1] == recorded.shape[2]:
            tokens = padding.bool()[:, None].expand_as(tokens)
        assert tokens.any(-1).all() and (recorded[tokens].sum(-1) > 0).all()
        torch.testing.assert_close(recorded[tokens], weights[tokens], atol=1e-5, rtol=0)
    return seen.calls


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", TEXT)
def test_text_models(name, padding):
    options, backend = TEXT[name]
    fast, slow = pair(name, {**SIZES, **options})
    inputs, mask = {"input_ids": IDS}, PADDINGS[padding]
    if mask is not None:
        inputs["attention_mask"] = mask
    if name == "Bart":
        inputs["decoder_input_ids"] = IDS[:, :5]
    calls = check(fast, slow, inputs, mask)
    assert {call.backend for call in calls} == {backend}
    assert {call.kind for call in calls} == ({"self", "cross"} if name == "Bart" else {"self"})
    if name == "Gemma2":
        assert calls[0].score.softcap == 2.0
    if name == "GptOss":
        sinks = fast.layers[0].self_attn.sinks
        recorded = calls[0].problem.sinks
        assert torch.equal(recorded, sinks) and not recorded.requires_grad
        assert recorded is not sinks and calls[0].weights.dense().sum(-1).mean() < 0.95
    if name == "DeepseekV3":
        assert calls[0].query.shape[-1] == 12  # and its values are 6 wide


def test_sliding_layers_alternate_with_full_ones():
    fast, _ = pair("Gemma3Text", {**SIZES, **TEXT["Gemma3Text"][0]})
    with torch.no_grad(), ch.watch(fast) as seen:
        fast(input_ids=IDS)
    sliding, full = (call.weights[0, 0, 8] for call in seen.calls)
    assert (sliding > 0).nonzero().flatten().tolist() == [5, 6, 7, 8] and (full > 0).all()


OWN_CODE = {
    "Deberta": SIZES,
    "DebertaV2": SIZES,
    "Bloom": {"vocab_size": 100, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "GPTJ": {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
}


@pytest.mark.parametrize("name", OWN_CODE)
def test_models_that_compute_attention_in_their_own_code_are_an_error(name):
    config = getattr(transformers, name + "Config")(**OWN_CODE[name])
    model = getattr(transformers, name + "Model")(config).eval()
    said = rf"the model {name}Model made no attention call(.|\n)*backend is 'eager'(.|\n)*has to call one of these"
    with pytest.raises(ch.ClearheadError, match=said), ch.watch(model), torch.no_grad():
        model(input_ids=IDS)
