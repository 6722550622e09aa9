"""A layer's number on a page and in a sentence is that of the layer in its model, in generations too."""

import os

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")

SMALL = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "max_position_embeddings": 64}


def label_of(seen):
    return [layer.label for layer in seen.layers()]


def generated(**more):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()
    with torch.no_grad(), ch.watch(model) as seen:
        model.generate(torch.arange(3, 12)[None], do_sample=False, max_new_tokens=3, min_new_tokens=3, **more)
    return seen


@pytest.mark.parametrize("use_cache", [True, False])
def test_generations(tmp_path, use_cache):
    seen = generated(use_cache=use_cache)
    wanted = [f"L{name.split('.')[2]}.{run}" for run in range(3) for name in seen.names]
    assert wanted[:3] == ["L0.0", "L1.0", "L0.1"] and label_of(seen) == wanted
    assert str(seen.distinctive()).split("H")[0].split(" ")[-1] in wanted
    again = ch.models.load_recording(seen.write(tmp_path / "seen.safetensors"))
    assert label_of(again) == wanted
    difference = seen.compare(again)
    assert [call.label for call in difference.calls] == wanted and str(difference).startswith("L")
    assert label_of(ch.models.Recording(seen.calls[:2])) == ["L0", "L1"]
    seen.view(beside=again).write(tmp_path / "beside.html")


def test_layers_that_share_a_module():
    torch.manual_seed(0)
    model = transformers.AlbertModel(transformers.AlbertConfig(**SMALL, embedding_size=16)).eval()
    with torch.no_grad(), ch.watch(model) as seen:
        model(torch.arange(3, 12)[None])
    assert label_of(seen) == ["L0", "L1"]
    with torch.no_grad(), ch.watch(model) as seen:
        for length in (12, 9):
            model(torch.arange(3, length)[None])
    assert label_of(seen) == ["L0.0", "L1.0", "L0.1", "L1.1"]


def test_one_forward():
    class Twice(torch.nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    model = torch.nn.Sequential(Twice(), Twice(), Twice())
    with ch.watch(model) as seen:
        model(torch.rand(1, 2, 5, 4))
    assert label_of(seen) == ["L0", "L1", "L2"]
