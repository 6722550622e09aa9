"""A model whose `forward` is called directly is recorded as one that is called."""

import functools
import os

import pytest
import torch
from torch import nn

import clearhead as ch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import IDS, MODELS, RIGHT, made  # noqa: E402


class Pipeline(nn.Module):
    """A module of another library around a model, which calls the model's `forward`."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        return self.model.forward(**inputs)


def call(model, **inputs):
    return model(**inputs)


def call_forward(model, **inputs):
    return model.forward(**inputs)


def call_class(model, **inputs):
    return type(model).forward(model, **inputs)


def call_pipeline(model, **inputs):
    return Pipeline(model)(**inputs)


def call_functionally(model, **inputs):
    return torch.func.functional_call(model, dict(model.named_parameters()), (), inputs)


def call_in_parallel(model, **inputs):
    return nn.DataParallel(model)(**inputs)


def call_wrapped_instance(model, **inputs):
    """As accelerate does, which puts a `forward` on each module."""
    model.forward = functools.wraps(model.forward)(functools.partial(type(model).forward, model))
    try:
        return model.forward(**inputs)
    finally:
        del model.forward


ENTRIES = [call_forward, call_class, call_pipeline, call_functionally, call_in_parallel, call_wrapped_instance]
INPUTS = {
    "Bert": {"input_ids": IDS, "attention_mask": RIGHT},
    "Llama": {"input_ids": IDS, "attention_mask": RIGHT.flip(1)},
    "T5": {"input_ids": IDS, "attention_mask": RIGHT, "decoder_input_ids": IDS[:, :4]},
}


@pytest.fixture
def hooked():
    """A model whose modules have each a `forward` of their own before it is watched."""
    model = made("Bert", **MODELS["Bert"])
    for module in model.modules():
        module.forward = functools.wraps(module.forward)(functools.partial(type(module).forward, module))
    return model


def known(seen):
    return [
        (call.name, call.kind, call.run, str(call.layer), None if call.padding is None else repr(call.padding))
        for call in seen
    ]


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("enter", ENTRIES)
def test_the_record_is_that_of_a_call(name, enter):
    model, inputs = made(name, **MODELS[name]), INPUTS[name]
    means = []
    recordings = []
    for run in (call, enter):
        with torch.no_grad(), ch.watch(model, values=True) as seen:
            run(model, **inputs)
            run(model, **inputs)
        recordings.append(seen)
        means.append(ch.models.Means())
        with torch.no_grad(), ch.models.statistics(model, [ch.reductions.Entropy()], merge=means[-1]):
            run(model, **inputs)
    wanted, found = recordings
    assert known(found) == known(wanted) and len(found.runs) == 2
    assert any(call.padding is not None for call in found)
    for layer in means[0]:
        torch.testing.assert_close(means[1][layer], means[0][layer], atol=0, rtol=0)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.weighted_transformed_norms, other.weighted_transformed_norms)


def test_modules_with_a_forward_of_their_own(hooked):
    own = {name: module.forward for name, module in hooked.named_modules()}
    plain = made("Bert", **MODELS["Bert"])
    recordings = []
    for model, enter in ((plain, call), (hooked, call), (hooked, call_forward)):
        with torch.no_grad(), ch.watch(model) as seen:
            enter(model, **INPUTS["Bert"])
        recordings.append(known(seen))
    assert recordings[0] == recordings[1] == recordings[2]
    assert all(module.forward is own[name] for name, module in hooked.named_modules())


def test_a_forward_that_is_put_on_a_module_while_watching_stays(hooked):
    first, second = list(hooked.modules())[:2]
    with torch.no_grad(), ch.watch(hooked):
        hooked(**INPUTS["Bert"])
        del first.forward
        second.forward = other = functools.partial(type(second).forward, second)
        hooked(**INPUTS["Bert"])
    assert "forward" not in vars(first) and second.forward is other


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = ch.nn.MultiHeadAttention(8, 2)
        self.linear = nn.Linear(8, 8)

    def forward(self, x, attention_mask):
        mask = ch.DenseMask(attention_mask[:, None, None].bool().expand(-1, 1, x.shape[1], -1))
        return self.linear.forward(self.attention.forward(x, x, x, mask=mask))


class Stacked(nn.Module):
    def __init__(self, by_forward):
        super().__init__()
        self.layers, self.by_forward = nn.ModuleList([Layer(), Layer()]), by_forward

    def forward(self, x, attention_mask):
        for layer in self.layers:
            x = (layer.forward if self.by_forward else layer)(x, attention_mask)
        return x


def test_inner_modules_are_entered_too():
    torch.manual_seed(0)
    model, x = Stacked(True).eval(), torch.randn(2, 9, 8)
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        model(x, RIGHT)
    model.by_forward = False
    with torch.no_grad(), ch.watch(model, values=True) as wanted:
        model(x, RIGHT)
    assert known(seen) == known(wanted) and [call.name for call in seen] == [
        "layers.0.attention",
        "layers.1.attention",
    ]
    knockout = ch.edits.Knockout(keys=0, layers=1)
    with torch.no_grad():
        plain = model(x, RIGHT)
        model.by_forward = True
        with ch.edit(model, knockout):
            edited = model.forward(x, RIGHT)
    assert not torch.equal(plain, edited)


def test_nothing_is_left_on_classes_and_modules():
    model = made("Bert", **MODELS["Bert"])
    classes = {type(module) for module in model.modules()}
    before = {cls: dict(vars(cls)) for cls in classes}
    with torch.no_grad(), ch.watch(model), ch.models.statistics(model, [ch.reductions.Entropy()]):
        model.forward(**INPUTS["Bert"])
    assert before == {cls: dict(vars(cls)) for cls in classes}
    assert not any("forward" in vars(module) for module in model.modules())


def test_another_model_of_the_same_class_is_none_of_its_calls():
    model, other = made("Bert", **MODELS["Bert"]), made("Bert", **MODELS["Bert"])
    with torch.no_grad(), ch.watch(model) as seen:
        other.forward(**INPUTS["Bert"])
        model.forward(**INPUTS["Bert"])
    assert len(seen) == 2 and len(seen.runs) == 1
