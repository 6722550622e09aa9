"""Names of the base classes, taken by a class of the caller's: one clear error where the name is taken."""

import copy
import dataclasses
import functools
import re

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
        (score, "factor", NUMBER),
        (score, "factor", torch.ones(4)),
        (score, "factor", LEARNT),
        (score, "steps", 3),
        (score, "steps", LAYER),
        (score, "check", True),
        (score, "softcap", LEARNT),
        (score, "product", NUMBER),
        (bias, "part", torch.ones(4)),
        (bias, "steps", 3),
        (bias, "lower", -1.0),
        (bias, "positional", LEARNT),
        (mask, "dense", torch.ones(3, 3)),
        (mask, "spans", []),
        (mask, "title", "mine"),
        (mask, "part", 0),
        (mask, "positional", 1),
    ],
)
def test_an_attribute_of_an_object(make, name, value):
    with pytest.raises(
        ch.ClearheadError, match=rf"(?s)^Own sets {name} to a {type(value).__name__}, and in .*my_{name}\.$"
    ):
        make(**{name: value})


TILE = {"tile": lambda self, query, key: query @ key.mT}


@pytest.mark.parametrize(
    ("base", "own", "said"),
    [
        (ch.extend.Score, {"factor": 2.0}, "Own has factor, a float, and in Score factor(width) is a method"),
        (
            ch.extend.Score,
            {"steps": property(lambda self: 3)},
            "Own has steps, a property, and in Score steps(query, key)",
        ),
        (
            ch.extend.Score,
            {"check": lambda self: None},
            "Own has check(self), and in Score check(query, key) is a method",
        ),
        (
            ch.extend.Score,
            {"softcap": "30"},
            "Own has softcap, a str, and in Score softcap bounds the scores, and is a number or None",
        ),
        (ch.extend.Bias, {"part": lambda self, i: i}, "Own has part(self, i), and in Bias part(sizes, at) is a method"),
        (ch.extend.Mask, {"title": "mine"}, "Own has title, a str, and in Mask title() is a method"),
        (ch.extend.Mask, {"matrix": torch.ones(2)}, "Own has matrix, a Tensor, and in Mask matrix(sizes) is a method"),
        (ch.Dot, {"lower": lambda self, query: None}, "Own has lower(self, query), and in Dot lower(query, key)"),
        (ch.extend.Score, {"softcap": lambda self: 3.0}, "Own has softcap, a function, and in Score softcap bounds"),
        (
            ch.extend.Score,
            {"factor": functools.cached_property(lambda self: 2.0)},
            "Own has factor, a cached_property, and in Score factor(width) is a method",
        ),
    ],
)
def test_an_attribute_of_a_class(base, own, said):
    with pytest.raises(ch.ClearheadError, match=re.escape(said)):
        type("Own", (base,), {"__module__": __name__} | own)


def test_names_that_are_free():
    names = (
        "scale",
        "bias",
        "mask",
        "weight",
        "width",
        "name",
        "reads",
        "keep",
        "heads",
        "key",
        "query",
        "_kept",
        "_sizes",
    )
    for name in names:
        for value in (LEARNT, torch.ones(2), 3):
            assert score(**{name: value}).factor(4) == 1.0
            found = ch.attention(
                X, X, X, score=score(**{name: value}), bias=bias(**{name: value}), mask=mask(**{name: value})
            )
            torch.testing.assert_close(found, torch.softmax(X @ X.mT, -1) @ X)


def test_what_a_subclass_may_do():
    class Own(ch.Dot):
        product = True
        softcap = 30

        def __init__(self):
            super().__init__()
            self.softcap = torch.tensor(20.0).item()
            self.factor = lambda width: 0.5  # another function in a method's place

        def forward(self, query):
            return query

        def check(self, query, key, more=None):
            pass

        @classmethod
        def example(cls, wide=4):
            return cls(), wide, wide

    expected = torch.softmax(20 * torch.tanh(X @ X.mT * 0.5 / 20), -1) @ X
    torch.testing.assert_close(ch.attention(X, X, X, score=Own()), expected)

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


def halved(self, query, key, by):
    return query @ key.mT / by


def by_two(function):
    @functools.wraps(function)
    def wrapper(self, query, key):
        return function(self, query, key, 2.0)

    return wrapper


@pytest.mark.parametrize(
    "tile",
    [
        by_two(halved),  # inspect.signature shows the arguments of the function inside
        functools.partialmethod(halved, by=2.0),
        functools.singledispatchmethod(by_two(halved)),
    ],
)
def test_decorated_methods(tile):
    own = type("Own", (ch.extend.Score,), {"__module__": __name__, "tile": tile})()
    torch.testing.assert_close(ch.attention(X, X, X, score=own), torch.softmax(X @ X.mT / 2, -1) @ X)


def test_a_function_without_a_signature_is_a_method():
    own = type("Own", (ch.extend.Score,), {"__module__": __name__, "tile": staticmethod(torch.matmul)})()
    square = X[:, :, :, :3]  # (1, 1, 3, 3)
    expected = torch.softmax(square @ square, -1) @ square
    torch.testing.assert_close(ch.attention(square, square, square, score=own), expected)


def test_methods_that_clearhead_does_not_call_take_any_arguments():
    class Read(ch.Additive):
        @classmethod
        def from_weights(cls, path):
            return path

    class Chapters(ch.Documents):
        @classmethod
        def from_position_ids(cls, ids, first):
            return ids[first:]

        def plot(self, ax):
            return ax

    assert Read.from_weights("here") == "here"
    assert Chapters.from_position_ids([0, 1], 1) == [1]
    assert Chapters([0, 0, 1]).plot(3) == 3


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
