"""Models of transformers run on clearhead: outputs are their own."""

import os
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import _attention
from clearhead.models.loading import bundled

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import IDS, RIGHT, SEQ2SEQ_SIZES, SIZES, T5, made  # noqa: E402

GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
BART = {"vocab_size": 100, **SEQ2SEQ_SIZES}
MODELS = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES)),
    "llama": lambda: transformers.LlamaModel(transformers.LlamaConfig(**GROUPED)),
    "mistral": lambda: transformers.MistralModel(transformers.MistralConfig(**GROUPED, sliding_window=4)),
    "gemma2": lambda: transformers.Gemma2Model(
        transformers.Gemma2Config(**GROUPED, sliding_window=4, attn_logit_softcapping=5.0)
    ),
    "gpt-oss": lambda: transformers.GptOssModel(
        transformers.GptOssConfig(**GROUPED, num_local_experts=2, num_experts_per_tok=1, sliding_window=4)
    ),
    "gpt2": lambda: transformers.GPT2Model(
        transformers.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    ),
    "t5": lambda: transformers.T5Model(transformers.T5Config(**T5)),
    "bart": lambda: transformers.BartModel(transformers.BartConfig(**BART)),
    "deepseek": lambda: transformers.DeepseekV3Model(
        transformers.DeepseekV3Config(
            **SIZES,
            num_key_value_heads=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=4,
            qk_nope_head_dim=8,
            v_head_dim=6,
            n_routed_experts=4,
            num_experts_per_tok=1,
            moe_intermediate_size=16,
            n_group=1,
            topk_group=1,
        )
    ),
}


def seen_positions(mask):
    """Outputs at padding mean nothing, and backends differ there."""
    return torch.ones_like(IDS, dtype=torch.bool) if mask is None else mask.bool()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mask", [None, RIGHT, RIGHT.flip(1)], ids=["whole", "right padding", "left padding"])
def test_outputs_are_the_models_own(name, mask, monkeypatch):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    inputs = {"input_ids": IDS, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = IDS[:, :5]
    calls = []
    attend = _attention.attend
    monkeypatch.setattr(_attention, "attend", lambda *a, **k: calls.append(1) or attend(*a, **k))
    with torch.no_grad():
        own = model(**inputs)[0]
        assert ch.models.run_on_clearhead(model) is model
        got = model(**inputs)[0]
    assert len(calls) >= 2
    keep = slice(None) if model.config.is_encoder_decoder else seen_positions(mask)
    torch.testing.assert_close(got[keep], own[keep], atol=1e-5, rtol=0)


def test_the_real_bert():
    model = transformers.AutoModel.from_pretrained(bundled(), local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled(), local_files_only=True)
    inputs = tokenizer(["The pump in Broad Street was closed.", "It was."], padding=True, return_tensors="pt")
    keep = inputs["attention_mask"].bool()
    with torch.no_grad():
        own = model(**inputs).last_hidden_state
        got = ch.models.run_on_clearhead(model)(**inputs).last_hidden_state
        with ch.watch(model) as seen:
            watched = model(**inputs).last_hidden_state
    torch.testing.assert_close(got[keep], own[keep], atol=1e-5, rtol=0)
    assert torch.equal(watched, got) and seen.calls[0].backend == "clearhead"
    assert len({id(call.mask) for call in seen.calls}) == 1


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(name, cache):
    torch.manual_seed(0)
    config = MODELS[name]().config
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache, "pad_token_id": 0}
    options |= {"attention_mask": RIGHT.flip(1), "eos_token_id": None, "disable_compile": True}
    own = model.generate(IDS, **options)
    assert torch.equal(ch.models.run_on_clearhead(model).generate(IDS, **options), own)


@pytest.mark.parametrize("mask", [torch.ones_like(RIGHT), RIGHT.flip(1)], ids=["whole", "left padding"])
def test_the_room_of_a_static_cache_is_not_read(mask):
    """The keys that are not filled yet hold NaN, which PyTorch's kernel would spread over the output."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS["llama"]().config).eval()
    length = IDS.shape[1]
    later = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
    given = {"attention_mask": later, "position_ids": later.cumsum(1)[:, -1:] - 1}
    with torch.no_grad():
        own = model(IDS.new_ones(2, 1), past_key_values=model(IDS, attention_mask=mask).past_key_values, **given).logits
        ch.models.run_on_clearhead(model)
        cache = transformers.StaticCache(config=model.config, max_cache_len=length + 5)
        model(IDS, attention_mask=mask, past_key_values=cache)
        for layer in cache.layers:
            layer.keys[:, :, length:], layer.values[:, :, length:] = torch.nan, torch.nan
        with ch.watch(model) as seen:
            got = model(IDS.new_ones(2, 1), past_key_values=cache, **given).logits
    torch.testing.assert_close(got, own, atol=1e-5, rtol=0)
    weights = seen.calls[-1].weights.dense()
    assert weights.shape[-1] == length + 5 and not weights[..., length + 1 :].any()


def other_memory(mask, hidden):
    mask.data = mask.masked_fill(hidden, False)


WRITES = {
    "in place": lambda mask, hidden: mask.masked_fill_(hidden, False),
    "through data": lambda mask, hidden: mask.data.masked_fill_(hidden, False),
    "by NumPy": lambda mask, hidden: np.putmask(mask.numpy(), hidden.expand_as(mask).numpy(), False),
    "other memory": other_memory,
}


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize("write", WRITES)
def test_a_mask_that_is_written_to_between_layers_is_read_again(context, static, write):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS["llama"]().config).eval()

    def hide(module, args, given):
        mask = given["attention_mask"]
        places = torch.arange(mask.shape[-1])
        WRITES[write](mask, (places >= 2) & (places < 4))

    def run(hides):
        cache = (
            transformers.StaticCache(config=model.config, max_cache_len=20) if static else transformers.DynamicCache()
        )
        given = {"attention_mask": RIGHT.flip(1)}
        model(IDS, past_key_values=cache, **given)
        handle = model.model.layers[1].self_attn.register_forward_pre_hook(hide, with_kwargs=True) if hides else None
        later = {"attention_mask": torch.cat([RIGHT.flip(1), torch.ones(2, 1, dtype=RIGHT.dtype)], 1)}
        logits = model(IDS.new_ones(2, 1), past_key_values=cache, **later).logits
        if handle is not None:
            handle.remove()
        return logits

    with context():
        own, unhidden = run(True), run(False)
        ch.models.run_on_clearhead(model)
        torch.testing.assert_close(run(True), own, atol=1e-5, rtol=0)
        assert (own - unhidden).abs().max() > 1e-4  # the write decides something


@pytest.mark.parametrize("tokens", [1, 3], ids=["one token", "several tokens"])
def test_a_layer_whose_keys_the_mask_does_not_fit_is_refused(tokens):
    """As by SDPA. A layer that adds keys of its own must widen the mask."""
    torch.manual_seed(0)
    model = MODELS["llama"]().eval()

    class WithMore(transformers.DynamicCache):
        def update(self, key, value, *given, **others):
            both = super().update(key, value, *given, **others)
            return tuple(torch.cat([t, t[:, :, :2]], 2) for t in both) if key.shape[2] == tokens else both

    mask, before = RIGHT.flip(1), IDS.shape[1] - tokens
    for error, match in ((RuntimeError, "must match"), (ch.ShapeError, "mask has shape")):
        cache = WithMore(config=model.config)
        with torch.no_grad():
            model(IDS[:, :before], attention_mask=mask[:, :before], past_key_values=cache)
            with pytest.raises(error, match=match):
                model(IDS[:, before:], attention_mask=mask, past_key_values=cache)
        ch.models.run_on_clearhead(model)


def test_training_gives_the_same_gradients():
    torch.manual_seed(0)
    model = MODELS["llama"]().train()
    found = []
    for _ in range(2):
        model.zero_grad()
        model(input_ids=IDS, attention_mask=RIGHT)[0][RIGHT.bool()].sin().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
        ch.models.run_on_clearhead(model)
    for got, own in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, own, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_compiled_model(name):
    torch.manual_seed(0)
    model = ch.models.run_on_clearhead(MODELS[name]().eval())
    inputs = {"input_ids": IDS, "attention_mask": RIGHT}
    with torch.no_grad():
        got = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs)[0]
        torch.testing.assert_close(got[RIGHT.bool()], model(**inputs)[0][RIGHT.bool()], atol=1e-5, rtol=0)


def test_what_it_cannot_take_is_a_clear_error():
    with pytest.raises(ch.ClearheadError, match="takes a model of transformers; got a Linear"):
        ch.models.run_on_clearhead(torch.nn.Linear(2, 2))
    config = transformers.DebertaV2Config(**SIZES)
    with pytest.raises(ch.ClearheadError, match="own code"):
        ch.models.run_on_clearhead(transformers.DebertaV2Model(config))


SPARSE_ENCODERS = ("BigBirdPegasus", "PegasusX")  # their encoders compute a softmax in their own code
WITHOUT_SDPA = {
    "NllbMoe": {**BART, "num_experts": 4},
    "PegasusX": BART,
    "BigBirdPegasus": {**BART, "attention_type": "original_full"},
    "Gemma2": GROUPED,
}


@pytest.mark.parametrize("mask", [None, RIGHT, RIGHT.flip(1)], ids=["whole", "right padding", "left padding"])
@pytest.mark.parametrize("name", WITHOUT_SDPA)
def test_models_whose_modules_do_not_say_whether_they_are_causal(name, mask):
    model = made(name, times=4, **WITHOUT_SDPA[name])
    assert not model._supports_sdpa
    with torch.no_grad():
        inputs = {"input_ids": IDS, "attention_mask": mask}
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = IDS
        own = model(**inputs, output_attentions=True)
        ch.models.run_on_clearhead(model)
        sparse = pytest.warns(UserWarning, match="is not in the record") if name in SPARSE_ENCODERS else nullcontext()
        with sparse, ch.watch(model) as seen:
            got = model(**inputs)
    keep = slice(None) if model.config.is_encoder_decoder else seen_positions(mask)
    torch.testing.assert_close(got[0][keep], own[0][keep], atol=1e-4, rtol=0)
    last = own.decoder_attentions[-1] if model.config.is_encoder_decoder else own.attentions[-1]
    call = [call for call in seen.calls if call.kind == "self"][-1]
    rows = seen_positions(None if model.config.is_encoder_decoder else mask)[:, None].expand(last.shape[:3])
    torch.testing.assert_close(call.weights.dense()[rows], last[rows], atol=1e-5, rtol=0)
    if name == "Gemma2" and mask is not None and not mask[1, 0]:
        assert call.weights[1, :, 0].sum() == 0 and call.uniform is None  # it sees nothing, and is given 0


def test_weights_that_were_asked_for_are_lazy_or_a_warning():
    model = MODELS["llama"]().eval()
    with torch.no_grad():
        eager = transformers.LlamaModel(model.config)
        eager.load_state_dict(model.state_dict())
        eager.set_attn_implementation("eager")
        expected = eager.eval()(input_ids=IDS, output_attentions=True).attentions
        ch.models.run_on_clearhead(model)
        with pytest.warns(UserWarning, match=r"give no weights.*ch.models.lazy_attentions\(model\)"):
            assert model(input_ids=IDS, output_attentions=True).attentions == ()
        with warnings.catch_warnings(), ch.models.lazy_attentions(model):
            warnings.simplefilter("error")
            found = model(input_ids=IDS, output_attentions=True).attentions
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine[...], theirs, atol=1e-5, rtol=1e-4)
