"""Every old name raises an error that says the new one, and the new one is there."""

import importlib
import re
from operator import attrgetter

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead.base.renamed import RENAMED


class Block(torch.nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


def recording():
    block = Block()
    with ch.watch(block, values=True) as seen:
        block(torch.rand(1, 2, 3, 4))
    return seen


def survey():
    return object.__new__(ch.models.Survey)


def explanation():
    return ch.explain(torch.eye(2), torch.eye(2), torch.eye(2))


OBJECTS = {
    "Recording": recording,
    "AttentionCall": lambda: recording()[0],
    "Survey": survey,
    "Explanation": explanation,
}
KEYWORDS = {
    "Recording.compare": lambda given: recording().compare(recording(), **given),
    "Explanation.html": lambda given: explanation().html(**given),
    "watch": lambda given: ch.watch(Block(), **given),
}


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_says_the_new_one(old):
    new, (owner, _, name) = RENAMED[old], old.partition("(")[0].rpartition(".")
    if "(" in old:
        keyword = old.partition("(")[2].rstrip("=)")
        with pytest.raises(TypeError) as raised:
            KEYWORDS[old.partition("(")[0]]({keyword: "a"})
    elif owner in OBJECTS:
        with pytest.raises(AttributeError) as raised:
            getattr(OBJECTS[owner](), name)
    else:
        with pytest.raises(AttributeError) as raised:
            attrgetter(old.removeprefix("clearhead."))(ch)
    assert f" is now {new}" in str(raised.value)
    known = new.partition("(")[0].partition(",")[0]
    if known.startswith("clearhead."):
        assert attrgetter(known.removeprefix("clearhead."))(ch) is not None
    else:
        assert hasattr(OBJECTS[known.partition(".")[0]](), known.partition(".")[2])


@pytest.mark.parametrize("old", [old for old in RENAMED if old.startswith("clearhead.")])
def test_an_import_of_an_old_name_says_the_new_one(old):
    owner, _, name = old.rpartition(".")
    with pytest.raises(ImportError, match=re.escape(f"{old} is now {RENAMED[old]}.")):
        exec(f"from {owner} import {name}", {})
    assert not hasattr(importlib.import_module(owner), name)


def test_keep_is_told_of_before_what_went_with_it():
    with pytest.raises(TypeError, match=r"watch\(keep=…\) is now"):
        ch.watch(Block(), heads=1, keep=ch.reductions.Entropy())


def test_what_never_was_a_name_is_an_error_as_ever():
    with pytest.raises(ImportError, match="cannot import name 'nothing' from 'clearhead'"):
        exec("from clearhead import nothing", {})
    with pytest.raises(AttributeError, match=r"module 'clearhead\.models' has no attribute 'nothing'"):
        _ = ch.models.nothing
    with pytest.raises(AttributeError, match="'Recording' object has no attribute 'nothing'"):
        _ = recording().nothing
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        ch.watch(Block(), nothing=1)


@pytest.mark.parametrize("name", ["nn.MultiHeadAttention", "models.statistics", "models.bundled", "edits.ScaleHeads"])
def test_a_name_of_a_namespace_is_told_at_the_top(name):
    with pytest.raises(AttributeError, match=rf"is in a namespace: clearhead\.{name}\."):
        getattr(ch, name.partition(".")[2])
    assert attrgetter(name)(ch) is not None
