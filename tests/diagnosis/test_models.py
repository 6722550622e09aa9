"""Recorded calls of models: no false alarm on clean ones, and faults that were planted in them."""

import math
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")

from small_models import IDS, MODELS, OWN_EAGER, PADDINGS, RIGHT, inputs_of, larger, made, pair, takes_a_mask  # noqa: E402


def fresh(name, **more):
    """A freshly initialised model."""
    return made(name, **MODELS[name], **more)


def seen_of(model, padding=None, **inputs):
    with torch.no_grad(), ch.watch(model, padding, values=True) as seen:
        model(**inputs)
    return seen


def names(findings):
    return {finding.name for finding in findings}


@pytest.mark.parametrize("name", [*MODELS, *OWN_EAGER])
def test_models_are_clean(name):
    for model in pair(name, {**MODELS, **OWN_EAGER}[name]):
        for mask in PADDINGS.values() if takes_a_mask(name) else (None,):
            diagnosis = seen_of(model, **inputs_of(name, mask)).diagnose()
            assert not diagnosis.errors and not diagnosis.warnings, diagnosis


@pytest.mark.parametrize("name", MODELS)
def test_fresh_models_are_uniform_which_is_a_note(name):
    diagnosis = seen_of(fresh(name), **inputs_of(name)).diagnose()
    assert not diagnosis.errors and not diagnosis.warnings, diagnosis
    if name in ("Bert", "GPT2", "Roberta", "ViT"):
        found = [finding for finding in diagnosis if finding.name == "uniform heads"]
        assert found and all(finding.severity == "note" for finding in found)


def test_the_real_bert_is_clean():
    from clearhead.models import bundled, load

    model, tokenizer = load(bundled())
    texts = ["The pump in Broad Street was closed.", "The doctor who had drawn the map had asked for it, " * 9]
    for some in (texts[:1], texts):
        inputs = tokenizer(some, return_tensors="pt", padding=True)
        diagnosis = seen_of(model, **inputs).diagnose()
        assert not diagnosis.errors and not diagnosis.warnings, diagnosis


def test_generations_are_clean():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODELS["Llama"])).eval()
    for options in ({}, {"cache_implementation": "static"}):
        with torch.no_grad(), ch.watch(model, values=True) as seen:
            model.generate(IDS, attention_mask=RIGHT.flip(1), max_new_tokens=3, do_sample=False, **options)
        diagnosis = seen.diagnose()
        assert not diagnosis.errors and not diagnosis.warnings, diagnosis
        assert {finding.where["layer"].split(", ")[1] for finding in diagnosis} <= {"step 0", "step 1", "step 2"}


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["Bert", "Llama", "GPT2", "T5"])
def test_padding_that_the_model_was_not_told_of(name, backend):
    model = fresh(name, attn_implementation=backend)
    flipped = RIGHT.flip(1)  # a causal model's words see the padding before them
    diagnosis = seen_of(model, flipped, **inputs_of(name)).diagnose()
    found = [finding for finding in diagnosis.warnings if finding.name == "padding attended"]
    assert found and {finding.where["sequence"] for finding in found} == {1}, diagnosis
    assert "4 keys of 4" in found[0].evidence


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_a_model_given_the_opposite_mask(name):
    diagnosis = seen_of(fresh(name), RIGHT, **inputs_of(name, 1 - RIGHT)).diagnose()
    found = [finding for finding in diagnosis.errors if finding.name == "padding attended"]
    assert len(found) == 2 and "opposite polarity" in found[0].remedy, diagnosis


def unscaled(model):
    for module in model.modules():
        for name in ("scaling", "scale_attn_weights"):
            if hasattr(module, name):
                setattr(module, name, 1.0 if name == "scaling" else False)


@pytest.mark.parametrize("name", ["Bert", "Llama", "Qwen3"])
def test_a_model_without_its_scale(name):
    wide = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "num_key_value_heads": 4}
    model = made(name, **{**MODELS[name], **wide}, initializer_range=0.09)
    assert "the scale" not in names(seen_of(model, **inputs_of(name)).diagnose())
    unscaled(model)
    found = [f for f in seen_of(model, **inputs_of(name)).diagnose().warnings if f.name == "the scale"]
    assert {finding.where["module"] for finding in found} == set(seen_of(model, **inputs_of(name)).names)


@pytest.mark.parametrize("name", ["Bert", "Llama", "GPT2", "T5"])
def test_nan_is_found_where_it_comes_from(name):
    model = fresh(name)
    layer = seen_of(model, **inputs_of(name))[1].name  # of the second call
    weight = next(p for p in model.get_submodule(layer).parameters() if p.ndim == 2)
    with torch.no_grad():
        weight[0] = float("nan")
    diagnosis = seen_of(model, **inputs_of(name)).diagnose()
    first = diagnosis.errors[0]
    assert first.name == "parameters that are not finite" and first.where["module"] == layer, diagnosis


@pytest.mark.parametrize("name", ["Bert", "ViT"])
def test_a_model_whose_scores_are_far_apart(name):
    model = larger(fresh(name), 1000)
    found = names(seen_of(model, **inputs_of(name)).diagnose().warnings)
    assert found >= {"saturation", "few effective keys"}


def test_one_call_and_the_recording_find_the_same():
    model = fresh("Bert")
    seen = seen_of(model, **inputs_of("Bert"))
    each = [finding.to_dict() for call in seen.calls for finding in call.diagnose()]
    assert each == [finding.to_dict() for finding in seen.diagnose()] and each
    assert ch.diagnose(seen[0]).to_dict() == seen[0].diagnose().to_dict()


def test_an_output_that_was_not_computed_so():
    """The model's own output of a recorded call is compared with the formula."""

    class Coarse(torch.nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    model = Coarse()
    x = torch.randn(1, 2, 30, 16, generator=torch.Generator().manual_seed(0))
    with ch.watch(model, values=True) as seen:
        model(x)
    assert not seen.diagnose() and seen.diagnose().unexamined == ["the mask you expect"]
    seen[0].outcome.output = seen[0].output.index_add(-2, torch.tensor([7]), torch.full((1, 2, 1, 16), 1e-4))
    (found,) = seen.diagnose().errors
    assert found.name == "an output of another formula" and found.where["query"] == 7
    with ch.watch(model) as seen:
        model(x)
    assert str(seen.diagnose()).splitlines()[1:] == [
        "Not examined: the mask you expect, values, the backend's output. Use ch.audit."
    ]


def test_an_edited_output_is_compared_with_the_edited_formula():
    model = fresh("Llama")
    edits = ch.edits.ScaleHeads(heads=0, factor=0.0), ch.edits.ScaleHeads(heads=1, factor=2.0)
    with torch.no_grad(), ch.edit(model, *edits), ch.watch(model, values=True) as seen:
        model(**inputs_of("Llama"))
    assert seen[0].factor is not None
    assert not seen.diagnose().errors
    seen[0].outcome.output = seen[0].output * 1.01
    assert names(seen.diagnose().errors) == {"an output of another formula"}


def test_dropout_is_no_error_of_the_backend(tmp_path):
    model = fresh("Llama", attention_dropout=0.3).train()
    with ch.watch(model, values=True) as seen:
        model(**inputs_of("Llama"))
    assert not seen.diagnose().warnings
    assert ch.models.load_recording(seen.write(tmp_path / "seen")).diagnose().to_dict() == seen.diagnose().to_dict()


def test_a_recording_from_a_file_finds_the_same(tmp_path):
    seen = seen_of(fresh("Bert"), RIGHT, **inputs_of("Bert", 1 - RIGHT))
    want = seen.diagnose().to_dict()
    assert ch.models.load_recording(seen.write(tmp_path / "seen")).diagnose().to_dict() == want and want["findings"]


class Trained(torch.nn.Module):
    """One head whose scores a parameter multiplies."""

    def __init__(self, factor):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))

    def forward(self, x):
        return F.scaled_dot_product_attention(self.factor * x, x, x)


@pytest.mark.parametrize(("growth", "collapses"), [(10.0, True), (1.2, False), (0.5, False)])
def test_entropy_over_training_steps(growth, collapses):
    model = Trained(0.3).train()
    x = torch.randn(2, 3, 20, 16, generator=torch.Generator().manual_seed(0))
    with ch.models.monitor(model, every=1) as seen:
        for _ in range(4):
            model(x)
            with torch.no_grad():
                model.factor *= growth
    diagnosis = ch.diagnose(seen)
    assert [(f.name, f.severity) for f in diagnosis] == [("entropy collapse", "warning")] * collapses, diagnosis
    if collapses:
        assert diagnosis[0].where == {"layer": "L0", "module": "Trained", "heads": [0, 1, 2]}
        last = [row["entropy"] for row in seen.table()][-3:]
        assert f"{min(last):.3g}" in diagnosis[0].evidence


@pytest.mark.parametrize("factors", [(0.3, 3.0, 30.0, 300.0, math.nan), (0.3, math.nan), (math.nan, math.nan)])
def test_training_that_ends_in_no_numbers(factors):
    x = torch.randn(2, 3, 20, 16, generator=torch.Generator().manual_seed(0))
    model = Trained(0.0).train()
    with ch.models.monitor(model, every=1) as seen:
        for factor in factors:
            with torch.no_grad():
                model.factor.fill_(factor)
            model(x)
    *others, last = ch.diagnose(seen)
    assert [finding.name for finding in others] == ["entropy collapse"] * (len(factors) == 5)
    assert (last.name, last.where) == ("no numbers", {"layer": "L0", "module": "Trained", "heads": [0, 1, 2]})
    assert f"from step {factors.index(math.nan)} on" in last.evidence
