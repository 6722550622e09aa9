"""Pictures of steps."""

import numpy as np
import pytest
from drawn import draw

import clearhead as ch

matplotlib = pytest.importorskip("matplotlib", reason="the extra [plot] is not installed")
matplotlib.use("Agg")
pyplot = pytest.importorskip("matplotlib.pyplot", reason="the extra [plot] is not installed")


def test_a_picture_holds_the_numbers_of_the_step():
    explanation = ch.explain(draw(3, 4), draw(5, 4, seed=1), draw(5, 2, seed=2))
    for name in ("scores", "weights", "output"):
        axis = explanation.plot(name)
        np.testing.assert_allclose(axis.images[0].get_array(), explanation[name], rtol=1e-6)
        assert axis.get_title() == name
    words = [label.get_text() for label in explanation.plot().get_yticklabels()]
    assert words == ["query 0", "query 1", "query 2"]


def test_each_head_has_a_picture_and_what_is_masked_is_hatched():
    x = draw(1, 2, 4, 4)
    axes = ch.explain(x, x, x, mask=ch.Causal()).plot("masked")
    assert [axis.get_title() for axis in axes] == ["masked, head 0", "masked, head 1"]
    assert axes[0].images[0].get_array().mask[0, 1]
    assert len(axes[0].figure.axes) == 3  # one bar for both, since they have one scale
    assert axes[0].images[0].get_clim() == axes[1].images[0].get_clim()


def test_on_axes_that_are_given():
    x = draw(3, 4)
    _, ax = pyplot.subplots()
    assert ch.explain(x, x, x).plot(ax=ax) is ax
    two = draw(1, 2, 3, 4)
    with pytest.raises(ch.ClearheadError, match="2 pictures"):
        ch.explain(two, two, two).plot(ax=ax)
    with pytest.raises(ch.ClearheadError, match="no step is called 'w'"):
        ch.explain(x, x, x).plot("w")


def test_small_pictures_have_their_numbers():
    x = draw(4, 4)
    axis = ch.explain(x, x[:3], x[:3]).plot()
    assert [text.get_text() for text in axis.texts][:3] == [f"{w:.4f}" for w in ch.weights(x, x[:3])[0].tolist()]
    masked = ch.explain(x, x, x, mask=ch.Causal()).plot("masked")
    assert len(masked.texts) == 10  # none for −∞
    assert not ch.explain(x, draw(9, 4), draw(9, 4)).plot().texts
    pyplot.close("all")
