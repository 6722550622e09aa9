"""Objects for a `with` statement: entered once, in each way in which Python enters one."""

import gc
import inspect
import random
import weakref

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch

transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
pytestmark = pytest.mark.usefixtures("few_to_collect")


class Block(torch.nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def small(config=None):
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = config or transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    return transformers.LlamaModel(config)


X = torch.rand(1, 2, 3, 4)
IDS = torch.arange(5)[None]
# each function that gives a context manager: how one is made, and how its model is run
MAKERS = {
    "watch": (lambda: (model := Block(), ch.watch(model)), X),
    "models.statistics": (lambda: (model := Block(), ch.models.statistics(model, ch.reductions.Entropy())), X),
    "edit": (lambda: (model := Block(), ch.edit(model, ch.edits.ScaleHeads(heads=0))), X),
    "models.monitor": (lambda: (model := Block().train(), ch.models.monitor(model)), X),
    "models.lazy_attentions": (lambda: (model := small(), ch.models.lazy_attentions(model)), IDS),
}


def test_each_public_function_for_a_with_statement_is_tried_here():
    found = set()
    every = {name: getattr(ch, name) for name in dir(ch)}
    models = {f"models.{name}": value for name, value in vars(ch.models).items() if name not in every}
    for name, given in (every | models).items():
        if inspect.isfunction(given):
            gives = str(given.__annotations__.get("return"))
            is_one = hasattr(getattr(ch.models, gives, None), "__enter__")
            if "ContextManager" in gives or is_one:
                found.add(name)
    assert found == set(MAKERS)


@pytest.mark.parametrize("name", MAKERS)
def test_entered_twice(name):
    model, manager = MAKERS[name][0]()
    with manager:
        model(MAKERS[name][1])
    with pytest.raises(ch.ClearheadError, match=rf"write `with ch.{name}\(...\):` each time"), manager:
        pass


def test_entered_again_while_it_runs():
    model, manager = MAKERS["edit"][0]()
    with manager:
        with pytest.raises(ch.ClearheadError, match="entered before"), manager:
            pass
        changed = model(X)
    assert not torch.equal(changed, model(X))


def test_a_monitor_that_is_let_go_leaves_the_model_and_one_with_a_callback_stays():
    from clearhead.models.interception import patch as _patch

    model, rows = Block().train(), []
    before = {key: len(wraps) for key, (_, wraps) in _patch._active.items()}
    ch.models.monitor(model, every=1)
    gc.collect()
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert {key: len(wraps) for key, (_, wraps) in _patch._active.items()} == before
    made = [ch.models.monitor(model, every=1)]
    with _patch._lock:  # a collection in its midst
        made.pop()
    assert model._forward_hooks
    model(X)
    assert not model._forward_hooks
    stays = weakref.ref(ch.models.monitor(model, every=1, callback=lambda step, found: rows.append(step)))
    gc.collect()
    model(X), model(X)
    assert rows == [0, 1]
    stays().remove()
    seen = ch.models.monitor(model, every=1)
    model(X)
    assert len(seen.table()) == 2
    model = seen = made = None
    gc.collect()
    assert {key: len(wraps) for key, (_, wraps) in _patch._active.items()} == before


@pytest.mark.parametrize("seed", range(6))
def test_models_of_one_configuration_keep_their_own_backends(seed):
    """Random calls of `run_on_clearhead` and of its undoing: each model runs on what was last said of it alone."""
    draw = random.Random(seed)
    if seed % 2:
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        text = transformers.CLIPTextConfig(vocab_size=50, **sizes)
        config = transformers.CLIPConfig(
            text_config=text.to_dict(), vision_config={**sizes, "image_size": 8, "patch_size": 4}
        )
        models = [transformers.CLIPModel(config), transformers.CLIPTextModel(config.text_config)]
        models.append(transformers.CLIPModel(config))
        inputs = {"input_ids": IDS, "pixel_values": torch.rand(1, 3, 8, 8)}
    else:
        config = small().config
        models, inputs = [small(config) for _ in range(3)], {"input_ids": IDS}
    backend = ["sdpa"] * 3
    for model in models:
        model.eval()
    for _ in range(5):
        which = draw.randrange(3)
        if draw.random() < 0.6:
            assert ch.models.run_on_clearhead(models[which]) is models[which]
            backend[which] = "clearhead"
        else:
            models[which].set_attn_implementation("sdpa")
            backend[which] = "sdpa"
            if models[which].config is config:  # as transformers does it, for all that still share the object
                continue
        for model, expected in zip(models, backend, strict=True):
            named = inputs if "CLIPModel" in type(model).__name__ or not seed % 2 else {"input_ids": IDS}
            with torch.no_grad(), ch.watch(model) as seen:
                model(**named)
            assert {call.backend for call in seen.calls} == {expected}
    assert config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["watch", "edit", "models.statistics", "models.lazy_attentions"])
def test_what_is_asked_of_it_outside_of_its_with_says_where_it_is(name):
    made = MAKERS[name][0]()[1]
    with pytest.raises(AttributeError, match=rf"with ch.{name}\(...\) as seen:"):
        _ = made.calls
    assert not hasattr(made, "__fspath__")
