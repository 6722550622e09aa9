"""The picture of one head."""

import pytest
import torch

import clearhead as ch

matplotlib = pytest.importorskip("matplotlib", reason="the extra [plot] is not installed")
matplotlib.use("Agg")


def test_a_small_head_shows_every_weight_and_its_words():
    weights = ch.weights(torch.rand(2, 3, 4, 8), torch.rand(2, 3, 5, 8))
    axes = weights.plot(1, 2, query_labels=["a", "b", "$c", "d"], key_labels=list("vwxyz"))
    assert torch.equal(torch.tensor(axes.images[0].get_array()), weights[1, 2])
    assert [label.get_text() for label in axes.get_xticklabels()] == list("vwxyz")
    axes.figure.canvas.draw()  # a lone dollar sign is no formula


def test_a_long_head_is_pooled():
    weights = ch.weights(torch.rand(1100, 4), torch.rand(1100, 4))
    axes = weights.plot()
    image = torch.tensor(axes.images[0].get_array())
    assert max(image.shape) <= 512
    torch.testing.assert_close(image.max(), weights.dense().max())


def test_bad_input():
    weights = ch.weights(torch.rand(2, 4, 8), torch.rand(2, 5, 8))
    with pytest.raises(ch.ClearheadError, match="takes 1 numbers"):
        weights.plot()
    with pytest.raises(ch.ClearheadError, match="query_labels has 1 words for 4"):
        weights.plot(0, query_labels=["a"])
