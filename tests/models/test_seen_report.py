"""A recorded call on the page: the data of the page give the call's own weights."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drawn import draw

import clearhead as ch
from clearhead.cli.report import summarise


class Block(torch.nn.Module):
    def forward(self, query, key, **options):
        return F.scaled_dot_product_attention(query, key, key, **options)


HOLES = draw(2, 1, 6, 9, seed=3) > 0
OPTIONS = {
    "nothing": {},
    "causal": {"is_causal": True},
    "holes": {"attn_mask": HOLES},
    "holes by head": {"attn_mask": draw(2, 4, 6, 9, seed=4) > 0},
    "padding": {"attn_mask": (torch.arange(9) < torch.tensor([4, 9])[:, None])[:, None, None]},
    "bias": {"attn_mask": draw(4, 6, 9, seed=5).masked_fill(draw(4, 6, 9, seed=6) > 1, -torch.inf)},
    "scale": {"scale": 0.9},
}


def weights_of(layer):
    """The page's formula, in NumPy."""
    key = layer.key.repeat(layer.query.shape[0] // layer.key.shape[0], 0).astype(float)
    scores = layer.scale * (layer.query.astype(float) @ key.transpose(0, 2, 1))
    queries, heads = layer.shape[0], range(layer.heads)
    if layer.bias is not None:
        scores = scores + np.stack([layer.bias.rows(h, 0, queries, layer.shape) for h in heads])
    inside = np.stack([layer.allowed(h, 0, queries) for h in heads])
    with np.errstate(invalid="ignore"):
        return np.where(inside & (layer.logsumexp > -np.inf)[..., None], np.exp(scores - layer.logsumexp[..., None]), 0)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("sequence", [0, 1])
def test_a_layer_makes_the_weights_of_its_call(name, sequence):
    block = Block()
    with ch.watch(block) as seen:
        block(draw(2, 4, 6, 8), draw(2, 4, 9, 8, seed=1), **OPTIONS[name])
    (layer,) = seen.layers(sequence=sequence, error=0)
    want = seen.calls[0].weights.dense()[sequence].numpy()
    np.testing.assert_allclose(weights_of(layer), want, atol=1e-6)
    np.testing.assert_allclose(layer.received, want.sum(1), atol=1e-5)
    figures = summarise(layer)
    means = layer.entropy.sum(1) / np.maximum(np.isfinite(layer.logsumexp).sum(1), 1)
    assert figures.focused[0] == means.argmin() and figures.diffuse[0] == means.argmax()


def test_report_writes_the_page_and_checks_the_words(tmp_path):
    block = Block()
    x = draw(1, 2, 5, 4)
    with ch.watch(block) as seen:
        block(x, x)
    words = ["<b>", "two", "three", "four", "five"]
    path = seen.view(tokens=words, title="A <title>").write(tmp_path / "page.html")
    page = path.read_text(encoding="utf-8")
    assert "A &lt;title&gt;" in page and "<b>" not in page and "\\u003cb\\u003e" in page
    with pytest.raises(ch.ShapeError, match="tokens has 2 words"):
        seen.view(tokens=["a", "b"]).write(tmp_path / "other.html")
    with pytest.raises(ch.ClearheadError, match="sequence is 3"):
        seen.view(tokens=words, sequence=3).write(tmp_path / "other.html")
    with pytest.raises(ch.ClearheadError, match="cannot write"):
        seen.view().write(tmp_path / "no folder" / "page.html")
    with pytest.raises(ch.ClearheadError, match=r"page\.pdf'.*ends in \.html or \.htm"):
        seen.view().write(tmp_path / "page.pdf")
    assert seen.view(tokens=words).write(tmp_path / "page").read_text().startswith("<!doctype html>")
    assert not (tmp_path / "other.html").exists()


WORDS = ["one", "two", "three", "four", "five"]


@pytest.fixture
def seen():
    block, x = Block(), draw(2, 2, 5, 4)
    with ch.watch(block) as found:
        block(x, x)
    return found


@pytest.mark.parametrize("make", [list, tuple, iter, np.array, lambda words: (w for w in words), lambda words: None])
def test_words_in_any_order_that_there_is(seen, make):
    (layer,) = seen.layers(make(WORDS), make(WORDS))
    assert layer.query_tokens == layer.key_tokens == (["0", "1", "2", "3", "4"] if make(WORDS) is None else WORDS)


@pytest.mark.parametrize(
    "tokens", ["one two three", set(WORDS), dict.fromkeys(WORDS, 1), 3, torch.arange(5.0), [1] * 5, b"12345"]
)
@pytest.mark.parametrize("argument", ["tokens", "source_tokens"])
def test_what_is_no_list_of_words_is_an_error(seen, argument, tokens):
    with pytest.raises(ch.ClearheadError, match=rf"^{argument} takes words(.|\n)*convert_ids_to_tokens"):
        seen.layers(**{argument: tokens})


@pytest.mark.parametrize("sequence", [1, -1, np.int64(1), np.uint8(1), torch.tensor(1)])
def test_a_sequence_is_a_whole_number(seen, sequence):
    want = seen.calls[0].query[1].numpy()
    np.testing.assert_array_equal(seen.layers(sequence=sequence, error=0)[0].query, want)


@pytest.mark.parametrize(
    ("path", "said"),
    [("a\0b", "null"), (None, "NoneType"), (3, "int"), (b"a.html", "bytes"), ("\ud800", "surrogate")],
)
def test_a_path_that_is_none_is_an_error(seen, path, said):
    with pytest.raises(ch.ClearheadError, match=rf"^cannot write the report to .*{said}"):
        seen.view().write(path)
