"""lazy_attentions: what a model gives inside of it equals what it gives alone, and on eager attention."""

import os

import pytest
import torch

import clearhead as ch
from clearhead.models.lazy_matrices.lazy_attention import DENSE

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import (  # noqa: E402
    IDS,
    MODELS,
    OWN_EAGER,
    PADDINGS,
    RIGHT,
    flat,
    inputs_of,
    own_attentions,
    pair,
    takes_a_mask,
    tensors,
)


@pytest.mark.parametrize(
    ("name", "padding"),
    [(name, padding) for name in MODELS for padding in PADDINGS if padding == "no padding" or takes_a_mask(name)],
)
def test_the_outputs_are_bit_identical_and_the_weights_those_of_eager(name, padding):
    mask = PADDINGS[padding]
    fast, slow = pair(name, MODELS[name])
    inputs = inputs_of(name, mask)
    with torch.no_grad():
        plain = fast(**inputs)
        made = DENSE.made
        with ch.models.lazy_attentions(fast):
            output = fast(**inputs, output_attentions=True)
            unasked = fast(**inputs)
        assert DENSE.made == made, "something was made dense"
        eager = own_attentions(slow(**inputs, output_attentions=True))
    for key, value in tensors(plain).items():
        assert torch.equal(value, output[key]) and torch.equal(value, unasked[key])
    assert not own_attentions(unasked)
    lazy = own_attentions(output)
    assert lazy.keys() == eager.keys() and len(lazy) > 0
    for key, layers in eager.items():
        assert len(lazy[key]) == len(layers)
        for one, want in zip(lazy[key], layers, strict=True):
            assert isinstance(one, ch.models.LazyAttention) and isinstance(one, torch.Tensor)
            assert one.shape == want.shape and one.dtype == want.dtype and one.device == want.device
            got = one.dense()
            sees = got.sum(-1) > 0  # SDPA gives a query that sees nothing 0, eager a uniform row
            if mask is None:
                assert sees.all()
            words = torch.ones_like(sees)
            if mask is not None and mask.shape[1] == sees.shape[2]:
                words = mask.bool()[:, None].expand_as(sees)
            assert sees[words].all()
            torch.testing.assert_close(got[words], want[words], atol=3e-6, rtol=0)


@pytest.mark.parametrize("name", OWN_EAGER)
def test_a_model_on_eager_gives_its_own_and_on_clearhead_lazy_ones(name):
    fast, slow = pair(name, OWN_EAGER[name])
    inputs = inputs_of(name, RIGHT)
    with torch.no_grad():
        eager = slow(**inputs, output_attentions=True).attentions
        with ch.models.lazy_attentions(fast):
            own = fast(**inputs, output_attentions=True).attentions
        ch.models.run_on_clearhead(fast)
        with ch.models.lazy_attentions(fast):
            lazy = fast(**inputs, output_attentions=True).attentions
    words = RIGHT.bool()[:, None].expand(2, 4, 9)
    for one, other, want in zip(own, lazy, eager, strict=True):
        assert type(one) is torch.Tensor and torch.equal(one, want)
        assert isinstance(other, ch.models.LazyAttention)
        torch.testing.assert_close(other.dense()[words], want[words], atol=3e-6, rtol=0)


GENERATE = {
    "Llama": ("Llama", {}),
    "left padding": ("Llama", {"attention_mask": RIGHT.flip(1)}),
    "beams": ("Llama", {"num_beams": 3}),
    "a static cache": ("Llama", {"cache_implementation": "static"}),
    "no cache": ("Llama", {"use_cache": False}),
    "a window": ("Mistral", {"attention_mask": RIGHT.flip(1), "num_beams": 2}),
    "Bart": ("Bart", {"num_beams": 2}),
    "T5": ("T5", {}),
    "Whisper": ("Whisper", {}),  # its generate() cuts the encoder's into sequences
}


@pytest.mark.parametrize("case", GENERATE)
def test_generate(case):
    name, options = GENERATE[case]
    fast, slow = pair(name, MODELS[name], "ForCausalLM" if name in ("Llama", "Mistral") else "ForConditionalGeneration")
    inputs = {key: value for key, value in inputs_of(name).items() if key != "decoder_input_ids"}
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, **options}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    for model in (fast, slow):
        settings = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
        model.generation_config.update(**settings, suppress_tokens=None, begin_suppress_tokens=None)
    plain = fast.generate(**inputs, **options)
    with ch.models.lazy_attentions(fast):
        output = fast.generate(**inputs, **options, output_attentions=True)
    eager = slow.generate(**inputs, **options, output_attentions=True)
    assert torch.equal(output.sequences, plain.sequences) and torch.equal(output.sequences, eager.sequences)
    assert all(torch.equal(a, b) for a, b in zip(output.scores, plain.scores, strict=True))
    assert own_attentions(output).keys() == own_attentions(eager).keys()
    pairs = list(zip(flat(output), flat(eager), strict=True))
    assert len(pairs) >= 10
    for one, want in pairs:
        assert one.shape == want.shape
        kind = torch.Tensor if one.shape[2] == 1 or name == "Whisper" else ch.models.LazyAttention
        assert type(one) is kind  # one query's row is smaller than its keys
        got = one.clone()
        sees = got.sum(-1) > 0
        assert sees[:, :, -1].all()
        torch.testing.assert_close(got[sees], want[sees], atol=3e-6, rtol=0)


@pytest.mark.parametrize("backend", ["sdpa", "clearhead"])
@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_other_ways_to_ask(name, backend):
    fast, slow = pair(name, MODELS[name])
    if backend == "clearhead":
        ch.models.run_on_clearhead(fast)
    inputs = inputs_of(name)
    with torch.no_grad(), ch.models.lazy_attentions(fast) as same:
        assert same is fast
        *_, attentions = fast(**inputs, output_attentions=True, return_dict=False)
        attentions = attentions if name == "Llama" else fast(**inputs, output_attentions=True).encoder_attentions
        want = flat(slow(**inputs, output_attentions=True))
    torch.testing.assert_close(torch.stack(attentions), torch.stack(want[:2]), atol=3e-6, rtol=0)


def test_a_module_called_by_itself_has_weights_too():
    fast, _ = pair("Llama", MODELS["Llama"])
    hidden = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    rotary = fast.rotary_emb(hidden, torch.arange(5)[None])
    with torch.no_grad(), ch.models.lazy_attentions(fast):
        _, attention = fast.layers[0].self_attn(hidden, rotary, attention_mask=None)
    assert (
        isinstance(attention, ch.models.LazyAttention) and attention[0, 0, 0, 1] == 0
    )  # sdpa without a mask is causal


def test_contacts_of_esm():
    options = {"vocab_size": 33, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 1}
    options |= {"intermediate_size": 64, "mask_token_id": 32, "position_embedding_type": "rotary"}
    torch.manual_seed(0)
    model = transformers.EsmModel(transformers.EsmConfig(**options)).eval()
    ids = IDS.clamp(4, 30)
    with torch.no_grad():
        with ch.models.lazy_attentions(model):
            got = model.predict_contacts(ids, torch.ones_like(ids))
        model.set_attn_implementation("eager")
        want = model.predict_contacts(ids, torch.ones_like(ids))
    torch.testing.assert_close(got, want, atol=3e-6, rtol=0)
