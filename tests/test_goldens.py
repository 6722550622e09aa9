"""Known figures: published examples, and cases whose answer is plain."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import clearhead as ch

GOLDENS = json.loads((Path(__file__).parent / "goldens.json").read_text())
ENGINES = pytest.mark.parametrize("engine", [None, "reference", "tiled"])


def to_digits(digits):
    """Half a unit of the last digit published, and float32 rounding."""
    return {"atol": 0.5 * 10**-digits + 2e-7, "rtol": 0}


@ENGINES
def test_scaled_dot_product(engine):
    golden = GOLDENS["scaled_dot_product"]
    query, key, value = (torch.tensor(golden[name])[None, None] for name in ("query", "key", "value"))
    np.testing.assert_allclose(ch.Dot()(query, key)[0, 0], golden["scores"], atol=1e-6)
    np.testing.assert_allclose(ch.weights(query, key).dense()[0, 0], golden["weights"], atol=1e-6)
    output = ch.attention(query, key, value, engine=engine)
    np.testing.assert_allclose(output[0, 0], golden["output"], atol=1e-6)


def test_softmax_over_the_wrong_axis_is_another_thing():
    golden = GOLDENS["scaled_dot_product"]
    scores = torch.tensor(golden["scores"])
    wrong = ch.masked_softmax(scores, dim=0)
    np.testing.assert_allclose(wrong, golden["softmax_over_the_wrong_axis"], atol=1e-6)
    assert not np.allclose(wrong, ch.masked_softmax(scores), atol=1e-2)


@ENGINES
def test_additive_alignment_of_the_concatenated_form(engine):
    golden = GOLDENS["additive_alignment"]
    rng = np.random.RandomState(42)
    encoder, decoder, layer_1, layer_2 = (rng.randn(*s) for s in ((5, 16), (1, 16), (32, 10), (10, 1)))
    score = ch.Additive.from_concatenated(layer_1.T, layer_2[:, 0], order="key_query")
    np.testing.assert_allclose(score(decoder, encoder)[0], golden["scores"], **to_digits(8))
    np.testing.assert_allclose(ch.weights(decoder, encoder, score=score)[0], golden["weights"], **to_digits(8))
    context = ch.attention(decoder, encoder, encoder, score=score, engine=engine)
    assert isinstance(context, np.ndarray)
    np.testing.assert_allclose(context[0], golden["context"], **to_digits(8))
    turned = np.concatenate([layer_1[16:], layer_1[:16]]).T
    other = ch.Additive.from_concatenated(turned, layer_2[:, 0], order="query_key")
    np.testing.assert_allclose(other(decoder, encoder), score(decoder, encoder), atol=1e-12)


def test_softmax_along_axis_0():
    golden = GOLDENS["softmax_axis_0"]
    np.testing.assert_allclose(ch.masked_softmax(golden["x"], dim=0), golden["y"], atol=5e-9)


def test_masked_softmax_with_lengths():
    scores = torch.rand(2, 2, 4, generator=torch.Generator().manual_seed(0))
    weights = ch.masked_softmax(scores, torch.tensor([2, 3]))
    assert (weights[0, :, 2:] == 0).all() and (weights[1, :, 3:] == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2))
    torch.testing.assert_close(weights[0, :, :2], scores[0, :, :2].softmax(-1))
    weights = ch.masked_softmax(scores, torch.tensor([[1, 3], [2, 4]]))
    assert weights[0, 0].tolist() == [1, 0, 0, 0]
    assert (weights[0, 1, 3:] == 0).all() and (weights[1, 0, 2:] == 0).all() and (weights[1, 1] > 0).all()


@ENGINES
@pytest.mark.parametrize("score", [ch.Dot(), ch.Additive(2, 2, 8)], ids=["dot", "additive"])
def test_equal_keys_give_the_mean_of_the_valid_values(score, engine):
    keys, values = torch.ones(2, 10, 2), torch.arange(40.0).reshape(1, 10, 4).repeat(2, 1, 1)
    output = ch.attention(torch.rand(2, 1, 2), keys, values, score=score, mask=ch.Lengths([2, 6]), engine=engine)
    expected = torch.tensor(GOLDENS["uniform_attention"]["output"], dtype=torch.float32)
    torch.testing.assert_close(output[:, 0], expected)


def test_multi_head_shapes_by_name():
    golden = {"B": 2, "L": 3, "heads": 6, "head_dim": 4}
    projected = torch.zeros(2, 3, 24)
    assert ch.check_shape(projected, "B L 24") == {"B": golden["B"], "L": golden["L"]}
    heads = projected.unflatten(-1, (golden["heads"], golden["head_dim"])).transpose(1, 2)
    assert ch.weights(heads, heads).shape == (2, 6, 3, 3)
    assert ch.attention(heads, heads, heads).transpose(1, 2).flatten(2).shape == (2, 3, 24)
    module = ch.nn.MultiHeadAttention(5, golden["heads"], head_dim=golden["head_dim"])
    x = torch.zeros(2, 3, 5)
    assert module.W_q(x).shape == (2, 3, 24) and module(x, x, x).shape == (2, 3, 5)
    assert module.attention_weights.shape == (2, 6, 3, 3)
