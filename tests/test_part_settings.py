"""The settings of user-defined scores, masks and biases, and the names that their attributes may have."""

import copy
import dataclasses
import functools

import numpy as np
import pytest
import torch
from torch import nn

import clearhead as ch


def score(**own):
    class Own(ch.extend.Score):
        def __init__(self):
            super().__init__()
            for name, value in own.items():
                setattr(self, name, value)

        def tile(self, query, key):
            return query @ key.mT

    return Own()


def bias(**own):
    class Own(ch.extend.Bias):
        def __init__(self):
            super().__init__()
            for name, value in own.items():
                setattr(self, name, value)

        def lower(self, sizes):
            return ch.extend.Added(dense=torch.zeros(1, 1, sizes.queries, sizes.keys))

    return Own()


def mask(**own):
    class Own(ch.extend.Mask):
        def __init__(self):
            for name, value in own.items():
                setattr(self, name, value)

        def lower(self, sizes):
            start = torch.zeros(1, 1, 1, dtype=torch.int64)
            return ch.extend.Spans(start, start + sizes.keys)

    return Own()


X = torch.rand(1, 1, 3, 4)
NUMBER, LEARNT, LAYER = 2.0, nn.Parameter(torch.ones(())), nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (score, "softcap", LEARNT),
        (score, "softcap", "30"),
        (score, "product", NUMBER),
        (bias, "positional", LEARNT),
        (mask, "positional", 1),
    ],
)
def test_a_setting_of_another_type(make, name, value):
    expected = "a finite number" if name == "softcap" else "True or False"
    with pytest.raises(ch.ClearheadError, match=rf"(?s)^{name} is .*; expected {expected}\.$"):
        make(**{name: value})
    base = type(make()).__mro__[1]
    with pytest.raises(ch.ClearheadError, match=rf"(?s)^{name} is .*; expected {expected}\.$"):
        type("Own", (base,), {name: value})


def test_names_that_are_free():
    names = "scale bias mask weight width name reads keep heads key query factor part matrix notes resolve explained"
    for name in [*names.split(), "_kept", "_sizes"]:
        for value in (LEARNT, torch.ones(2), 3):
            found = ch.attention(
                X, X, X, score=score(**{name: value}), bias=bias(**{name: value}), mask=mask(**{name: value})
            )
            torch.testing.assert_close(found, torch.softmax(X @ X.mT, -1) @ X)


def test_a_mask_that_is_a_dataclass():
    @dataclasses.dataclass(frozen=True, eq=False, repr=False)
    class First(ch.extend.Mask):
        keys: int = 2

        def lower(self, sizes):
            start = torch.zeros(1, 1, 1, dtype=torch.int64)
            return ch.extend.Spans(start, start + self.keys)

    seen = ch.attention(X, X, X, mask=First())
    torch.testing.assert_close(seen, ch.attention(X, X[:, :, :2], X[:, :, :2]))


def test_a_softcap_of_the_class():
    class Own(ch.Dot):
        softcap = 2.0

    class OfProperty(ch.Dot):
        @property
        def softcap(self):
            return 2.0

    for own in (Own(), OfProperty(), Own(softcap=2.0)):
        expected = torch.softmax(2 * torch.tanh(X @ X.mT / 2 / 2), -1) @ X
        torch.testing.assert_close(ch.attention(X, X, X, score=own), expected)
        torch.testing.assert_close(own(X, X), 2 * torch.tanh(X @ X.mT / 2 / 2))
    assert "softcap=2.0" in repr(Own())


@pytest.mark.parametrize("value", [0, 0.0, -1.0, float("nan"), float("inf"), True])
def test_a_softcap_that_bounds_nothing(value):
    with pytest.raises(ch.ClearheadError, match=rf"^softcap is {value}; expected a "):
        ch.Dot().softcap = value
    with pytest.raises(ch.ClearheadError, match=rf"^softcap is {value}; expected a "):
        type("Own", (ch.Dot,), {"__module__": __name__, "softcap": value})


def test_settings_by_numpy_and_by_properties():
    class Own(ch.extend.Bias):
        @functools.cached_property
        def positional(self):
            return True

        def lower(self, sizes):
            return ch.ALiBi(1).lower(sizes)

    assert Own().positional
    assert bias(positional=np.bool_(True)).positional


def test_a_mask_keeps_attributes_of_any_name_in_copies():
    own = mask(_kept=torch.ones(2), _kept_tokens=3)
    ch.attention(X, X, X, mask=own)
    assert copy.deepcopy(own)._kept_tokens == 3
    assert torch.equal(copy.copy(own)._kept, torch.ones(2))


def test_a_changed_attribute_makes_other_spans():
    class First(ch.extend.Mask):
        def __init__(self):
            self._kept_keys = 1

        def depends(self):
            return ()

        def lower(self, sizes):
            start = torch.zeros(1, 1, 1, dtype=torch.int64)
            return ch.extend.Spans(start, start + self._kept_keys)

    own = First()
    for keys in (1, 2):
        own._kept_keys = keys
        expected = ch.attention(X, X[:, :, :keys], X[:, :, :keys])
        torch.testing.assert_close(ch.attention(X, X, X, mask=own), expected)
