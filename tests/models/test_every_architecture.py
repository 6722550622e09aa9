"""A sample of the trial that `tests/every_architecture.py` makes of every architecture, and the page that it writes."""

import os
from dataclasses import replace

import pytest
import torch
from zoo import document, trial
from zoo.backends import captured, columns
from zoo.registry import config_class, names
from zoo.small import Size, parts, shrink

import clearhead as ch
from clearhead.models.interception.masks import Recorded
from clearhead.models.recorder.recorder import Recorder

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")

# one for each way to attention: grouped heads, an encoder with a decoder and biases, images, sounds, windows beside
# full layers, sinks, low ranks, PyTorch's own module, attention beside state spaces
SAMPLE = {
    "llama": ("equal", ["sdpa"]),
    "t5": ("equal", ["sdpa"]),
    "clip_vision_model": ("equal", ["sdpa"]),
    "whisper": ("equal", ["sdpa"]),
    "gemma3_text": ("equal", ["sdpa"]),
    "gpt_oss": ("equal", ["eager"]),
    "qwen2_vl_vision": ("equal", ["sdpa"]),
    "bloom": ("own code", []),
    "mamba": ("none", []),
}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample(name):
    outcome = trial.attempt(name)
    assert (outcome.kind, outcome.backends) == SAMPLE[name], outcome
    assert (outcome.calls > 0) == (outcome.kind == "equal")


def test_the_page_names_the_architectures_of_this_version():
    version, outcomes = document.read()
    if version != transformers.__version__:
        pytest.skip(f"docs/models.md is of transformers {version}, installed is {transformers.__version__}")
    assert sorted(outcomes) == names()
    for name, (kind, _) in SAMPLE.items():
        assert outcomes[name].startswith(trial.KINDS[kind]), (name, outcomes[name])


def test_the_page_has_nothing_that_is_not_equal_and_counts_its_rows():
    _, outcomes = document.read()
    assert not [name for name, text in outcomes.items() if text.startswith(trial.KINDS["different"])]
    assert document.counts(list(outcomes.values())) in document.PATH.read_text(encoding="utf-8")


def scaled(before, recorder, call):
    return before(recorder, replace(call, scale=1.01 * (call.scale or call.query.shape[-1] ** -0.5)))


def unmasked(before, recorder, call):
    return before(recorder, replace(call, read_masks=Recorded))


def every_other(before, recorder, call):
    recorder.times = getattr(recorder, "times", 0) + 1
    return before(recorder, call) if recorder.times % 2 else None


@pytest.mark.parametrize("wrong", [scaled, unmasked, every_other])
def test_wrong_records_are_not_equal(monkeypatch, wrong):
    before = Recorder.before
    monkeypatch.setattr(Recorder, "before", lambda recorder, call: wrong(before, recorder, call))
    assert trial.attempt("bert").kind == "different"


def test_of_many_keys_some_are_compared_and_the_sum():
    query, key = torch.randn(2, 1, 2, 300, 8, generator=torch.Generator().manual_seed(0)).unbind()
    with captured() as found:
        torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True)
    (call,) = found.calls
    assert call.shape == (1, 2, 300, 300) and call.weights.shape[-1] == 257
    right = ch.weights(query, key, mask=ch.Causal()).dense()
    assert call.off(right) < 1e-6
    unseen = next(j for j in range(300) if j not in columns(300).tolist())
    wrong = right.clone()
    wrong[..., 299, unseen] += 0.1
    assert call.off(wrong) > 0.09  # by the sum


def test_a_small_configuration_keeps_a_layer_of_each_kind():
    config = config_class("gemma3")()
    shrink(config, Size(layers=2, divisor=4))
    (text,) = [part for part in parts(config) if part.model_type == "gemma3_text"]
    assert set(text.layer_types) == {"sliding_attention", "full_attention"} and len(text.layer_types) == 2
    assert text.num_hidden_layers == 2 and text.vocab_size == 1000
