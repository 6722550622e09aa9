"""What a beginner writes first and wrongly: the message says what is meant."""

import copy
from operator import attrgetter

import pytest
import torch

import clearhead as ch

X = torch.rand(2, 5, 4)


def test_an_explanation_names_what_it_has():
    explanation = ch.explain(X, X, X)
    instead = {"weights": r"explanation\['weights'\]", "save": r"write\(path\)", "show": r"frame\(\)"}
    for name, words in instead.items():
        with pytest.raises(ch.ClearheadError, match=rf"^Explanation has no {name}\. Write .*{words}"):
            getattr(explanation, name)
        assert not hasattr(explanation, name)
    with pytest.raises(AttributeError, match=r"^'Explanation' object has no attribute 'far'$"):
        _ = explanation.far
    assert str(copy.copy(explanation)) == str(explanation)


NEAR = {
    "softmax": "masked_softmax",
    "CausalMask": "Causal",
    "Weigths": "weights",
    "entropys": "reductions.Entropy",
    "models.MultiheadAttention": "nn.MultiHeadAttention",
    "nn.MultiheadAttention": "nn.MultiHeadAttention",
    "reductions.Knockout": "edits.Knockout",
}


@pytest.mark.parametrize("wrong", NEAR)
def test_a_name_that_is_nearly_right(wrong):
    space, _, name = f"clearhead.{wrong}".rpartition(".")
    with pytest.raises(AttributeError) as raised:
        attrgetter(wrong)(ch)
    assert str(raised.value) == f"module {space!r} has no attribute {name!r}. Did you mean clearhead.{NEAR[wrong]}?"


@pytest.mark.parametrize("space", [ch, ch.nn, ch.models, ch.reductions, ch.distributed], ids=lambda m: m.__name__)
def test_a_name_that_is_far_from_all(space):
    for far in ("convolve", "__wrapped__", "_ipython_display_", "x"):
        with pytest.raises(AttributeError, match=f"^module '{space.__name__}' has no attribute '{far}'$"):
            getattr(space, far)


def test_a_recording_is_saved_by_write():
    attend = ch.nn.DotProductAttention()
    with ch.watch(attend) as seen:
        attend(X, X, X)
    with pytest.raises(AttributeError, match=r"no attribute 'save'\. A recording is saved by \.write\(path\)$"):
        _ = seen.save
    with pytest.raises(AttributeError, match=r"no attribute 'far'$"):
        _ = seen.far


def test_modules_are_imported_by_their_names():
    from clearhead import problem  # a module, which is imported all the same

    assert problem.__name__ == "clearhead.problem"
