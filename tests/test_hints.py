"""What a beginner writes first and wrongly: the message says what is meant."""

import copy
from operator import attrgetter

import numpy as np
import pytest
import torch

import clearhead as ch

X = torch.rand(2, 5, 4)
IDS = torch.randint(9, (2, 5))
ATTENDS = {
    "attention": ch.attention,
    "weights": lambda q, k, v: ch.weights(q, k),
    "plan": ch.plan,
    "explain": ch.explain,
    "score": lambda q, k, v: ch.Dot()(q, k),
    "DotProductAttention": ch.nn.DotProductAttention(),
    "MultiHeadAttention": ch.nn.MultiHeadAttention(4, 2),
    "AdditiveAttention": ch.nn.AdditiveAttention(4),
    "prepare": lambda q, k, v: ch.nn.AdditiveAttention(4).prepare(k, v),
}


@pytest.mark.parametrize("name", ["attention", "weights", "plan", "explain", "DotProductAttention"])
def test_a_turned_query_is_told_of_first(name):
    with pytest.raises(ch.ShapeError, match=r"(?s)pass query\.mT\..*Bilinear"):
        ATTENDS[name](torch.rand(2, 4, 3), X, X)
    with pytest.raises(ch.ShapeError) as raised:  # turned, it would not fit either
        ATTENDS[name](torch.rand(2, 6, 3), X, X)
    assert "mT" not in str(raised.value)


@pytest.mark.parametrize("name", ATTENDS)
def test_integers_are_refused_and_token_ids_named(name):
    for given in (IDS, IDS.int()):
        with pytest.raises(ch.ClearheadError, match=r"\.float\(.*Of token ids pass .*nn\.Embedding"):
            ATTENDS[name](given, given, given)
    with pytest.raises(ch.ClearheadError, match="expected float32") as raised:
        ATTENDS[name](IDS.bool(), IDS.bool(), IDS.bool())
    assert "Embedding" not in str(raised.value)


@pytest.mark.parametrize(
    "mask", [[2, 4], (2, 4), torch.tensor([2, 4]), np.array([2, 4])], ids=lambda x: type(x).__name__
)
def test_lengths_as_a_mask_are_named(mask):
    attend = ch.nn.DotProductAttention()
    for function in (ch.attention, ch.plan, ch.partial, attend, lambda q, k, v, mask: ch.weights(q, k, mask=mask)):
        with pytest.raises(ch.ClearheadError, match="Lengths"):
            function(X, X, X, mask=mask)


def test_weights_take_no_value():
    for call in (
        lambda: ch.weights(X, X, X),
        lambda: ch.weights(X, X, value=X),
        lambda: ch.weights(X, X, X, mask=None),
    ):
        with pytest.raises(ch.ClearheadError, match=r"depend on no value\. Pass weights\(query, key\)"):
            call()


class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = ch.nn.MultiHeadAttention(4, 2)


def test_weights_before_any_call():
    model = Holder()
    with pytest.raises(ch.ClearheadError, match=r"^MultiHeadAttention has no attention_weights yet: no call of it"):
        _ = model.attend.attention_weights
    model.attend(X, X, X)
    assert model.attend.attention_weights[0].shape == (2, 5, 5)


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
    "causal": "Causal",
    "CausalMask": "Causal",
    "lengths": "Lengths",
    "Weigths": "weights",
    "Entropy": "reductions.Entropy",
    "entropys": "reductions.Entropy",
    "multiheadattention": "nn.MultiHeadAttention",
    "models.MultiheadAttention": "nn.MultiHeadAttention",
    "nn.MultiheadAttention": "nn.MultiHeadAttention",
    "nn.Causal": "Causal",
    "reductions.Knockout": "edits.Knockout",
    "distributed.Attention": "distributed.attention",
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
