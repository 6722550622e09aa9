"""compare(): backends beside the formula on each call's own inputs."""

import pytest
import torch

import clearhead as ch
from clearhead.models import bundled, load

transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import IDS, SIZES, T5, made  # noqa: E402

LEFT = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
SMALL = SIZES | {"num_hidden_layers": 3}


def model_of(kind, **more):
    return made(kind, **SMALL, num_key_value_heads=2, **more)


def llama(**more):
    return model_of("Llama", **more)


def t5():
    return made("T5", **T5)


def bert():
    return load(bundled())[0]


MODELS = {
    "llama": (llama, {"input_ids": IDS}),
    "llama, left padding": (llama, {"input_ids": IDS, "attention_mask": LEFT}),
    "large scores": (lambda: llama(initializer_range=1.0), {"input_ids": IDS}),
    "t5": (t5, {"input_ids": IDS, "attention_mask": LEFT.flip(1), "decoder_input_ids": IDS[:, :4]}),
    "bert": (bert, {"input_ids": IDS, "attention_mask": LEFT.flip(1)}),
}


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FAILS = ("llama, left padding", torch.float64)  # the test after this one


@pytest.mark.parametrize(("name", "dtype"), [(n, t) for n in MODELS for t in DTYPES if (n, t) != FAILS], ids=str)
def test_good_backends_compute_their_formula(name, dtype):
    make, inputs = MODELS[name]
    model = make().to(dtype)
    found = ch.models.compare_backends(model, "sdpa", "eager", inputs)
    assert found.ok() and found.first is None, str(found)
    assert {row["backend"] for row in found.table()} == {"sdpa", "eager"}
    assert "every call" in str(found) and model.config._attn_implementation == "sdpa"


def test_eager_attention_of_float64_gives_words_nan_behind_left_padding():
    """float64's least value is −∞ to its softmax in float32: rows of padding are NaN, and 0 · NaN reaches the words."""
    make, inputs = MODELS[FAILS[0]]
    found = ch.models.compare_backends(make().to(FAILS[1]), "sdpa", "eager", inputs)
    first = found.first
    assert (first.backend, first.number) == ("eager", 1) and first.error != first.error
    assert not any(call.departs for call in found.calls if call.backend == "sdpa")


@pytest.fixture
def register():
    """Registers a backend with SDPA's masks, for the time of a test."""
    functions, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface

    def add(function):
        functions.register("wrong", function)
        masks.register("wrong", masks._global_mapping["sdpa"])

    yield add
    functions._global_mapping.pop("wrong", None)
    masks._global_mapping.pop("wrong", None)


def sdpa(module, *args, **more):
    return transformers.AttentionInterface._global_mapping["sdpa"](module, *args, **more)


def scaled(module, q, k, v, mask, scaling=None, **more):
    return sdpa(module, q, k, v, mask, scaling=scaling * (1.01 if module.layer_idx == 1 else 1), **more)


def without_mask(module, q, k, v, mask, is_causal=None, **more):
    if module.layer_idx != 1:
        return sdpa(module, q, k, v, mask, is_causal=is_causal, **more)
    return sdpa(module, q, k, v, None, is_causal=False, **more)


def of_nan(module, q, k, v, mask, **more):
    out, weights = sdpa(module, q, k, v, mask, **more)
    return (out * torch.nan if module.layer_idx == 1 else out), weights


@pytest.mark.parametrize("function", [scaled, without_mask, of_nan])
@pytest.mark.parametrize("order", [("sdpa", "wrong"), ("wrong", "eager")])
def test_a_wrong_backend_is_named_with_its_layer(register, function, order):
    register(function)
    found = ch.models.compare_backends(llama(), *order, {"input_ids": IDS})
    first = found.first
    assert (first.name, first.number, first.backend) == ("layers.1.self_attn", 1, "wrong")
    departing = [call for call in found.calls if call.departs and call.error == call.error]
    # what follows a layer of NaN is NaN by its own formula too
    assert function is of_nan or departing == [first]
    assert str(found).startswith("wrong departs from its formula first in L1, layers.1.self_attn:")
    assert not ch.models.compare_backends(llama(), *order, IDS).ok()


def test_sinks_that_a_backend_leaves_out(register):
    register(lambda module, *args, s_aux=None, **more: sdpa(module, *args, **more))
    model = model_of("GptOss", head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=4)
    found = ch.models.compare_backends(model, "eager", "wrong", {"input_ids": IDS})
    assert (found.first.backend, found.first.number) == ("wrong", 0)
    assert all(call.departs == (call.backend == "wrong") for call in found.calls)


def test_a_tolerance_of_ones_own(register):
    register(scaled)
    found = ch.models.compare_backends(llama(), "sdpa", "wrong", {"input_ids": IDS}, tolerance=0.01)
    assert found.ok() and all(call.tolerance == 0.01 for call in found.calls)
    assert not ch.models.compare_backends(llama(), "sdpa", "wrong", {"input_ids": IDS}, tolerance=0).ok()


def test_backends_are_set_back_also_after_an_error(register):
    def failing(module, *args, **more):
        raise RuntimeError("out of order")

    register(failing)
    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config=config | {"vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2},
            vision_config=config | {"image_size": 8, "patch_size": 4},
        )
    ).eval()
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    parts = (model.config, model.config.text_config, model.config.vision_config)
    before = [part._attn_implementation for part in parts]
    assert before[1:] == ["eager", "sdpa"]
    inputs = {"input_ids": IDS, "pixel_values": torch.rand(2, 3, 8, 8)}
    assert ch.models.compare_backends(model, "sdpa", "eager", inputs).ok()
    assert [part._attn_implementation for part in parts] == before
    with pytest.raises(RuntimeError, match="out of order"):
        ch.models.compare_backends(model, "eager", "wrong", inputs)
    assert [part._attn_implementation for part in parts] == before


def test_a_cache_among_the_inputs_stays_as_it_is():
    model = llama()
    with torch.no_grad():
        cache = model(IDS[:, :5], use_cache=True).past_key_values
    found = ch.models.compare_backends(model, "sdpa", "eager", {"input_ids": IDS[:, 5:], "past_key_values": cache})
    assert found.ok() and cache.get_seq_length() == 5


def test_surroundings_change_nothing():
    model = llama()
    want = ch.models.compare_backends(model, "sdpa", "eager", IDS).table()
    with torch.inference_mode():
        assert ch.models.compare_backends(model, "sdpa", "eager", IDS).table() == want
    with torch.no_grad(), ch.watch(model) as seen:
        assert ch.models.compare_backends(model, "sdpa", "eager", IDS).table() == want
    assert len(seen.calls) == 6
    torch.set_default_dtype(torch.float64)
    try:
        assert ch.models.compare_backends(model, "sdpa", "eager", IDS).table() == want
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ch.ClearheadError, match="model of transformers"):
        ch.models.compare_backends(torch.nn.Linear(2, 2), "sdpa", "eager", torch.zeros(2))
    with pytest.raises(ch.ClearheadError, match=r"no backend 'kernels-community/flash-attn'"):  # it would be loaded
        ch.models.compare_backends(llama(), "sdpa", "kernels-community/flash-attn", IDS)
    with pytest.raises(ch.ClearheadError, match="eval mode"):
        ch.models.compare_backends(llama().train(), "sdpa", "eager", IDS)
    with pytest.raises(ValueError, match="does not support"):
        ch.models.compare_backends(model_of("Gemma2", head_dim=8), "sdpa", "eager", IDS)
    config = transformers.DebertaV2Config(**SMALL)
    with pytest.raises(ch.ClearheadError, match="its own code"):
        ch.models.compare_backends(transformers.DebertaV2Model(config).eval(), "eager", "sdpa", IDS)
