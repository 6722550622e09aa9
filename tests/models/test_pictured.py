"""Pictures and tables of recorded calls."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import clearhead as ch

matplotlib = pytest.importorskip("matplotlib", reason="the extra [plot] is not installed")
pytest.importorskip("transformers", reason="the extra [models] is not installed")
matplotlib.use("Agg")
pyplot = pytest.importorskip("matplotlib.pyplot", reason="the extra [plot] is not installed")


@pytest.fixture(scope="module")
def bert():
    """Two sentences, the second padded, and their tokens."""
    from clearhead.models.loading import bundled, load

    model, tokenizer = load(bundled())
    inputs = tokenizer(["The pump was closed by the board.", "A $short one."], return_tensors="pt", padding=True)
    with ch.watch(model) as seen, torch.no_grad():
        model(**inputs)
    return seen, [tokenizer.convert_ids_to_tokens(ids.tolist()) for ids in inputs["input_ids"]]


def test_all_heads_of_a_layer(bert):
    seen, (tokens, _) = bert
    axes = seen.plot(3, tokens=tokens)
    assert len(axes) == 12 and axes[0].figure.get_suptitle() == "L3 (encoder.layer.3.attention.self)"
    for head, axis in enumerate(axes):
        np.testing.assert_array_equal(axis.images[0].get_array(), seen[3].weights[0, head])
    axes = seen.plot("encoder.layer.3.attention.self", 5, tokens=tokens, title="One", scale="log")
    assert [label.get_text() for label in axes.get_xticklabels()] == tokens and axes.get_title() == "One, head 5"


@pytest.mark.parametrize("letter", [10, 18])
@pytest.mark.parametrize("heads", [0, [0, 1, 2, 3]])
def test_every_word_of_a_slide_is_there(letter, heads):
    """Letters of a slide are made smaller, not left out: 16 words, of one head and in a grid, each in its room."""
    with ch.watch(block := Block()) as seen:
        block(torch.rand(1, 4, 16, 8))
    words = [f"w{i}" for i in range(16)]
    with matplotlib.rc_context({"font.size": letter}):
        axes = np.ravel(seen.plot(0, heads, tokens=words))
        axes[0].figure.canvas.draw()
    corner = axes[-1 if len(axes) == 1 else 2]
    for labels in (corner.get_xticklabels(), corner.get_yticklabels()):
        assert [label.get_text() for label in labels] == words
        assert all(4.5 < label.get_fontsize() <= letter for label in labels)
    boxes = [label.get_window_extent() for label in corner.get_yticklabels()]
    assert all(one.y0 >= other.y1 - 2 for one, other in itertools.pairwise(boxes))  # none upon another
    pyplot.close("all")


@pytest.mark.parametrize("heads", [5, [5, 7]])
def test_padding_is_left_out(bert, heads):
    seen, (_, tokens) = bert
    words = [word for word in tokens if word != "[PAD]"]
    for given in (tokens, words):
        axes = np.ravel(seen.plot(3, heads, sequence=1, tokens=given))
        axes[0].figure.canvas.draw()
        shown = [label.get_text() for label in axes[0].get_yticklabels()]
        assert shown == [word.replace("$", r"\$") for word in words]
        count = len(words)
        for axis, head in zip(axes, np.ravel(heads), strict=True):
            cells = axis.images[0].get_array()
            assert not np.ma.getmaskarray(cells).any()
            np.testing.assert_allclose(cells, seen[3].weights[1, int(head), :count, :count], atol=1e-6)


class Block(torch.nn.Module):
    def forward(self, x, attention_mask=None):
        keep = None if attention_mask is None else attention_mask[:, None, None].bool()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=keep, is_causal=keep is None)


def test_a_long_call_is_pooled_without_its_padding():
    block, real = Block(), 1300
    mask = torch.zeros(1, 1500)
    mask[:, -real:] = 1
    x = torch.randn(1, 2, 1500, 8)
    with ch.watch(block) as seen:
        block(x, attention_mask=mask)
    cells = seen.plot(0, 1).images[0].get_array()
    assert cells.shape == (434, 434)
    words = x[0, 1, -real:].double()
    dense = torch.softmax(words @ words.T / 8**0.5, -1)
    whole = F.pad(dense, (0, 2, 0, 2)).view(434, 3, 434, 3).amax((1, 3))
    # a weight is exp(score - logsumexp): roundings of scores up to 15 in float32 are relative errors of it
    np.testing.assert_allclose(cells, whole, rtol=15 * 2**-23, atol=0)


def test_a_step_of_a_generation_has_the_last_words():
    class Cached(torch.nn.Module):
        def forward(self, x, past):
            keys = torch.cat([past, x], 2)
            return F.scaled_dot_product_attention(x, keys, keys), keys

    block, past = Cached(), torch.rand(1, 2, 4, 8)
    with ch.watch(block) as seen:
        block(torch.rand(1, 2, 1, 8), past)
    axes = seen.plot(0, 0, tokens=list("abcde"))
    assert [t.get_text() for t in axes.get_yticklabels()] == ["e"]
    assert [t.get_text() for t in axes.get_xticklabels()] == list("abcde")


@pytest.mark.parametrize(
    ("layer", "given", "said"),
    [
        (9, {}, "no layer 9"),
        (0, {"heads": 12}, "a head of plot"),
        (0, {"sequence": 2}, "sequence is 2"),
        (0, {"scale": "x"}, "scale is 'x'"),
    ],
)
def test_bad_input(bert, layer, given, said):
    with pytest.raises(ch.ClearheadError, match=said):
        bert[0].plot(layer, **given)


def test_cross_attention_has_two_texts():
    from models import small_models

    model, _ = small_models.pair("Bart", small_models.SEQ2SEQ)
    with ch.watch(model) as seen, torch.no_grad():
        model(**small_models.inputs_of("Bart"))
    axes = seen.plot("decoder 0, cross", 1, tokens=list("abcde"), source_tokens=list("123456789"))
    assert [t.get_text() for t in axes.get_yticklabels()] == list("abcde")
    assert [t.get_text() for t in axes.get_xticklabels()] == list("123456789")


def test_a_recording_in_a_notebook(bert):
    html = bert[0]._repr_html_()
    assert html.count("<tr>") == 7 and "encoder.layer.5.attention.self" in html and "2 × 12 × " in html
    hostile = type("Hostile", (torch.nn.Module,), {"forward": lambda self, x: self.inner(x)})()
    hostile.inner = Block()
    hostile._modules["<img src=x onerror=alert(1)>"] = hostile._modules.pop("inner")
    hostile.forward = lambda x: hostile._modules["<img src=x onerror=alert(1)>"](x)
    with ch.watch(hostile) as seen:
        for _ in range(50):
            hostile(torch.rand(1, 2, 3, 4))
    for html in (seen._repr_html_(), seen.compare(seen)._repr_html_()):
        assert "<img" not in html and "&lt;img" in html and "10 more" in html and html.count("<tr>") == 41
