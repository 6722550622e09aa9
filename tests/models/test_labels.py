"""A layer's number on a page, in a table and in a sentence is that of the layer in its model, in generations too."""

import contextlib
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead.models.interception.layers import Layers
from clearhead.models.recordings.calls import labels

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import SIZES, made  # noqa: E402
from small_models import T5 as SMALL_T5  # noqa: E402

SMALL = {**SIZES, "max_position_embeddings": 64}
IDS = torch.arange(3, 12)[None]
T5 = ["encoder 0", "encoder 1", "decoder 0", "decoder 0, cross", "decoder 1", "decoder 1, cross"]


def label_of(seen):
    return [layer.label for layer in seen.layers()]


def said(seen):
    return list(map(str, labels(seen.calls)))


def llama(**more):
    return made("Llama", "ForCausalLM", **SMALL | more)


def t5():
    return made("T5", "ForConditionalGeneration", **SMALL_T5, decoder_start_token_id=0)


def albert(layers=3):
    return made("Albert", **SMALL | {"num_hidden_layers": layers}, embedding_size=16)


def generated(model, tokens=3, **more):
    with torch.no_grad(), ch.watch(model) as seen:
        model.generate(IDS, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, **more)
    return seen


def run(model, **options):
    with torch.no_grad(), ch.watch(model, **options) as seen:
        model(input_ids=IDS, decoder_input_ids=IDS[:, :5]) if hasattr(model, "decoder") else model(IDS)
    return seen


@pytest.mark.parametrize("use_cache", [True, False])
def test_generations(tmp_path, use_cache):
    seen = generated(llama(), use_cache=use_cache)
    turn = "step" if use_cache else "run"
    wanted = [f"L{name.split('.')[2]}, {turn} {number}" for number in range(3) for name in seen.names]
    assert wanted[:3] == [f"L0, {turn} 0", f"L1, {turn} 0", f"L0, {turn} 1"] and label_of(seen) == wanted
    most = seen.distinctive()
    heads = [label.head(most.head) for label in labels(seen.calls)]
    assert heads[most.call] in str(most) and heads[most.call].startswith(f"L{most.layer}H{most.head}, {turn} ")
    again = ch.models.load_recording(seen.write(tmp_path / "seen.safetensors"))
    assert label_of(again) == wanted
    difference = seen.compare(again)
    assert [str(call.label) for call in difference.calls] == wanted and str(difference).startswith("L")
    assert label_of(ch.models.Recording(seen.calls[:2])) == ["L0", "L1"]
    assert label_of(ch.models.Recording(seen.calls[2:4])) == (
        ["L0, step 1", "L1, step 1"] if use_cache else ["L0", "L1"]
    )
    seen.view(beside=again).write(tmp_path / "beside.html")


def test_a_last_token_that_no_step_has_read_is_left_out_with_a_warning(tmp_path):
    """By the ids of the whole text: each step has the words of its own queries and keys, of its first Lk tokens."""
    sizes = {"vocab_size": 20, "n_embd": 32, "n_layer": 1, "n_head": 4}
    model = made("GPT2", "LMHeadModel", **sizes, bos_token_id=1, eos_token_id=19)
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        ids = model.generate(torch.arange(2, 8)[None], max_new_tokens=4, min_new_tokens=4, pad_token_id=0)
    words = [f"w{place}" for place in range(10)]
    for given in (words, words[:9]):
        told = pytest.warns(UserWarning, match="tokens has 10 tokens, and the model has read 9: .* never read")
        with told if len(given) == 10 else contextlib.nullcontext():
            layers = seen.layers(given)
        assert [layer.query_tokens for layer in layers] == [words[:6], ["w6"], ["w7"], ["w8"]]
        assert [layer.key_tokens for layer in layers] == [words[:length] for length in (6, 7, 8, 9)]
    with pytest.warns(UserWarning, match="never read") as said:
        seen.view(tokens=words).write(tmp_path / "page.html")
        table, axes = seen.table(tokens=ids), seen.plot(0, 0, step=1, tokens=words)
        assert seen.explain(0, 2, "w7", "w1", step=2, tokens=words).title
        assert seen.distinctive(ids)
    assert [one.filename for one in said] == [__file__] * 5
    assert [label.get_text() for label in axes.get_yticklabels()] == ["w6"]
    for step, (length, call) in enumerate(zip((6, 7, 8, 9), seen, strict=True)):
        last = ids[0, length - 1]
        same = [place for place in range(length - 1) if ids[0, place] == last]
        if same and step:
            wanted = call.weights.dense()[0, 1, 0, same].sum()
            assert table[4 * step + 1]["same word"] == pytest.approx(float(wanted), rel=1e-5)
    assert any("same word" in row for row in table[4:])
    for wrong in (words[:4], [*words, "w10"]):  # no more than one
        with pytest.raises(ch.ShapeError, match=f"tokens has {len(wrong)} words"):
            seen.view(tokens=wrong)


def test_two_layers_that_generate_six_tokens():
    seen = generated(made("GPT2", "LMHeadModel", vocab_size=100, n_embd=32, n_layer=2, n_head=4), 6)
    assert said(seen) == [f"L{layer}, step {step}" for step in range(6) for layer in range(2)]
    rows = seen.table(ch.reductions.Entropy())
    assert {row["layer"] for row in rows} == {0, 1} and [row["step"] for row in rows[::8]] == [0, 1, 2, 3, 4, 5]
    assert list(rows[0])[:4] == ["layer", "run", "step", "module"]
    words = [f"w{place}" for place in range(11)]
    explained = seen.explain(-1, 2, 0, "w3", step=2, tokens=words)
    assert torch.equal(explained["weights"].flatten(), seen[5].weights[0, 2, 0])
    assert seen.explain(1, 2, "w10", step=2, tokens=words)["weights"].shape == explained["weights"].shape
    for step, message in ((None, r"means 6 calls; pass step=, and a layer .*'L1, step 0'"), (6, "there are 6 steps")):
        with pytest.raises(ch.ClearheadError, match=message):
            seen.explain(1, 2, 0, step=step)
    with pytest.raises(ch.ClearheadError, match="query is 'w3', which is no token of the text: w10"):
        seen.explain(1, 2, "w3", step=2, tokens=words)
    with pytest.raises(ch.ClearheadError, match="pass tokens="):
        seen.explain(1, 2, "w3", step=2)
    twice = [*words[:4], "w1", *words[5:]]
    with pytest.raises(ch.ClearheadError, match="key is 'w1', which stands at the places 1, 4 of the text: pass one"):
        seen.explain(1, 2, 0, "w1", step=2, tokens=twice)
    assert len(seen.view(layer="L1, step *").page.shown) == 6
    assert [label for label, _ in seen.view(layer="*step 2", heads=slice(1, None)).page.shown] == [
        "L0, step 2", "L1, step 2",
    ]  # fmt: skip


def test_two_generations_in_one_recording():
    model = llama()
    with torch.no_grad(), ch.watch(model) as seen:
        for length in (12, 8):
            model.generate(torch.arange(3, length)[None], do_sample=False, max_new_tokens=2, min_new_tokens=2)
    assert said(seen)[::2] == ["L0, run 0, step 0", "L0, run 1, step 1", "L0, run 2, step 0", "L0, run 3, step 1"]


def test_a_generation_inside_the_forward_of_another_module():
    class Answers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.reader, self.writer = llama(num_hidden_layers=1), llama()

        def forward(self, ids):
            self.reader(input_ids=ids)
            return self.writer.generate(ids, do_sample=False, max_new_tokens=3, min_new_tokens=3)

    model = Answers()
    with torch.no_grad(), ch.watch(model) as seen:
        model(IDS)
    alone = generated(model.writer)
    assert said(seen)[0] == "reader 0" and said(seen)[1:] == [f"writer {name[1:]}" for name in said(alone)]
    assert [call.run for call in seen] == [0, *(call.run for call in alone)]
    joined = seen["writer.model.layers.1.self_attn"].joined()
    assert torch.equal(joined[:], alone["model.layers.1.self_attn"].joined()[:])
    cut = ch.edits.Knockout(layers="writer 1", keys=0)
    with torch.no_grad(), ch.edit(model, cut), ch.watch(model) as edited:
        model(IDS)
    for call in edited:
        assert (call.weights[..., 0] == 0).all() == (str(call.layer) == "writer 1")


def test_layers_that_share_a_module():
    model = albert()
    assert label_of(run(model)) == ["L0", "L1", "L2"]
    assert said(run(model, layers=[1])) == ["L1"]
    with torch.no_grad(), ch.watch(model) as seen:
        for length in (12, 9):
            model(torch.arange(3, length)[None])
    assert label_of(seen) == [f"L{layer}, run {number}" for number in range(2) for layer in range(3)]
    with torch.no_grad():
        with ch.edit(model, ch.edits.ScaleHeads(layers=1, heads=2)), ch.watch(model) as edited:
            model(IDS)
        with ch.watch(model) as edited_within, ch.edit(model, ch.edits.ScaleHeads(layers=1, heads=2)):
            model(IDS)
    for each in (edited, edited_within):
        assert [int(call.weights[0, 2].sum()) for call in each] == [9, 0, 9]
    with pytest.raises(ch.ClearheadError, match="counts from the last layer"):
        run(model, layers=-1)


def test_a_plain_module_that_calls_attention_itself():
    class Plain(torch.nn.Module):
        def forward(self, x):
            for _ in range(3):
                x = x + F.scaled_dot_product_attention(x, x, x)
            return F.scaled_dot_product_attention(x, x[:, :, :2], x[:, :, :2])

    model = Plain()
    with ch.watch(model) as seen:
        model(torch.rand(1, 2, 5, 4))
    assert said(seen) == ["L0", "L1", "L2", "L3, cross"]
    with ch.watch(model, layers=slice(1, 3)) as seen:
        model(torch.rand(1, 2, 5, 4))
    assert said(seen) == ["L1", "L2"] and labels(seen.calls)[1].head(1) == "L2H1"


def test_stacks_are_named():
    seen = run(t5())
    assert label_of(seen) == said(seen) == T5
    assert labels(seen.calls)[3].head(2) == "decoder 0, cross, head 2"
    assert [row["layer"] for row in seen.table(ch.reductions.Entropy())[::4]] == T5
    assert said(generated(t5()))[-1] == "decoder 1, cross, step 2"
    for layers, wanted in (
        (1, [1, 4, 5]), (-1, [1, 4, 5]), ("decoder 0", [2]), ("decoder*", [2, 3, 4, 5]), ("*, cross", [3, 5]),
        (["encoder 1", slice(0, 1)], [0, 1, 2, 3]), ("*.SelfAttention", [0, 1, 2, 4]), (np.array([0]), [0, 2, 3]),
    ):  # fmt: skip
        assert said(run(t5(), layers=layers)) == [T5[number] for number in wanted], layers
        assert [label for label, _ in seen.view(layer=layers).page.shown] == [T5[number] for number in wanted], layers
    with pytest.raises(
        ch.ClearheadError, match=r"means 3 calls; pass a layer that means one: 'encoder 1', 'decoder 1'"
    ):
        seen.explain(1, 0, 0)
    assert seen.explain("decoder 1, cross", 0, 0)["weights"].numel() == 9
    assert seen.rollout(layers="encoder *").shape == (1, 9, 9)
    assert ch.audit(seen, {"decoder ?": ch.Causal(), 0: None}).tests[0].holds
    found = [finding.where for finding in seen.diagnose()]
    assert all(where["layer"] in T5 and where["module"] in seen.names for where in found)


def test_calls_are_found_by_the_names_of_layers():
    """In a recording and in what is made of it; as `layers=` of other functions choose them."""
    model = t5()
    seen = run(model)
    with torch.no_grad(), ch.models.statistics(model, [ch.reductions.Entropy()]) as reduced:
        model(input_ids=IDS, decoder_input_ids=IDS[:, :5])
    for calls in (seen, reduced, seen.compare(seen)):
        for number, name in enumerate(T5):
            assert [call.name for call in calls[name]] == [seen.calls[number].name], name
        assert [str(call.layer) for call in calls["decoder*"]] == T5[2:]
        assert [str(call.layer) for call in calls["*.1.*"]] == [T5[1], *T5[3:]]  # of modules, as before
        with pytest.raises(ch.ClearheadError, match=r"no layer 'L1'; calls were made by 'encoder.* \(encoder 0\)"):
            calls["L1"]
    steps = generated(llama())
    assert steps["L1"] == steps["model.layers.1.self_attn"] and steps["L1"].joined().shape == (1, 4, 11, 11)
    assert [call.shape for call in steps["L1, step 2"]] == [(1, 4, 1, 11)]
    with pytest.raises(
        ch.ClearheadError,
        match=r"Recording\[…\]: there is no layer 'L9'; calls were made by 'model\.layers\.0\.self_attn' \(L0\), "
        r"'model\.layers\.1\.self_attn' \(L1\), numbered from 0\. A pattern has to fit the whole name",
    ):
        steps["L9"]


def test_the_heads_of_a_page_are_chosen_in_every_form():
    seen = run(llama())
    for heads, wanted in ((-1, [3]), (slice(1, 3), [1, 2]), ([0, slice(2, None)], [0, 2, 3]), (torch.tensor(2), [2])):
        assert seen.view(layer=-1, heads=heads).page.shown == [("L1", wanted)]
        watching = ch.models.statistics(model := llama(), [ch.reductions.Entropy()], layers=-1, heads=heads)
        with torch.no_grad(), watching as kept:
            model(IDS)
        assert list(kept[0].heads) == wanted and kept[0].row["layer"] == 1


def test_edits_take_every_form():
    model = llama()
    with torch.no_grad():
        plain = model(IDS).logits
        whole = []
        for layers, heads, queries in (
            (1, [1, 2], [7, 8]), (-1, slice(1, 3), slice(-2, None)), ("L1", [slice(1, 2), -2], [-1, slice(7, 8)]),
            (slice(1, None), np.array([1, 2]), torch.tensor([7, 8])), (["*.1.*"], (1, 2), range(7, 9)),
        ):  # fmt: skip
            with ch.edit(model, ch.edits.ScaleHeads(layers=layers, heads=heads, queries=queries)):
                whole.append(model(IDS).logits)
    assert all(torch.equal(one, whole[0]) for one in whole) and not torch.equal(whole[0], plain)
    with (
        pytest.raises(ch.ClearheadError, match=r"such a layer\. .*'model\.layers\.0\.self_attn' \(L0\)"),
        ch.edit(model, ch.edits.ScaleHeads(layers=2)),
    ):
        model(IDS)


def test_a_part_of_a_model_has_the_numbers_of_the_whole():
    model = llama(num_hidden_layers=4)
    assert said(run(model, layers=[2, "*.3.*"])) == ["L2", "L3"]
    with ch.models.monitor(model.train(), every=1, layers=-1) as monitored:
        model(IDS)
    assert {(row["layer"], row["module"]) for row in monitored.table()} == {(3, "model.layers.3.self_attn")}


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["layers.4.self_attn", "layers.12.self_attn"], ["L4", "L12"]),
        (["encoder.0.blocks.0.attn", "encoder.0.blocks.1.attn", "encoder.1.blocks.0.attn"], ["L0", "L1", "L2"]),
        (["encoder.block.0.layer.0.attn", "encoder.block.1.layer.0.attn"], ["L0", "L1"]),
        (["first", "second", "first"], ["L0", "L1", "L2"]),
        (["layers.0.attn", "layers.1.attn", "layers.0.attn", "layers.1.attn"], ["L0", "L1", "L2", "L3"]),
        (["vision.layers.0.attn", "text.model.layers.0.attn"], ["vision 0", "text 0"]),
        (["blocks.0.attn", "pooler"], ["L0", "L1"]),
    ],
)
def test_numbers_stand_in_names(names, wanted):
    layers = Layers(dict.fromkeys(names, "SelfAttention"))
    for _ in range(2):  # runs
        turns = {}
        assert [str(layers.site(name, False, turns).layer) for name in names] == wanted


def test_several_modules_that_attend_in_one_layer():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.time, self.space = (torch.nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

        def forward(self, x):
            return self.space(x, x, x)[0] + self.time(x, x, x)[0]

    with torch.no_grad(), ch.watch(model := torch.nn.Sequential(Layer(), Layer())) as seen:
        model(torch.rand(1, 5, 8))
    assert said(seen) == ["L0, space", "L0, time", "L1, space", "L1, time"]
    assert labels(seen.calls)[1].head(1) == "L0H1, time"
