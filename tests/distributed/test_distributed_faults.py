"""Ranks that call differently, that end, or that never call: an error in words, and no rank that waits forever."""

import pytest
from ranks.processes import on_ranks

NAMED = {
    "mask": "the mask", "documents": "the mask", "rule": "the mask", "bias": "the bias",
    "score": "the score",
    "own score": "the score", "own scale": "the score", "large mask": "the bias",
    "sinks": "the sinks", "dtype": "the dtype", "heads": "the batch and the heads", "layout": "the layout",
    "method": "the call", "dropout": "the dropout", "gradient": "which inputs need a gradient",
}  # fmt: skip


def test_ranks_that_differ_are_named():
    for said in on_ranks(3, "ranks.faults:unlike"):
        assert said.pop("after") == "done"
        assert {name: words for name, words in said.items() if f"{NAMED[name]} differs on rank 2" not in words} == {}


@pytest.mark.parametrize("when", ["before", "between messages", "between passes"])
def test_a_rank_that_ends(when):
    *others, last = on_ranks(3, "ranks.faults:one_ends", when, may_end=(2,), patience=60)
    assert last is None
    assert all("has ended" in words for words in others)


def test_a_rank_that_never_calls():
    *others, last = on_ranks(2, "ranks.faults:one_never_calls", patience=60)
    assert last == "slept" and all("all ranks of the group must make together" in words for words in others)


def test_bad_input():
    for said in on_ranks(2, "ranks.faults:bad_input"):
        assert said.pop("through a mesh") == "done"
        for name, words in {
            "whole": "layout.shard",
            "unlike": "holds 6 of",
            "no layout": "pass a Layout",
            "numbers": "for arithmetic",
            "method": "'exchange', 'gather'",
            "dtensor": "DTensor",
            "mesh": "one of its dimensions",
            "dropout": "dropout_p",
        }.items():
            assert words in said.pop(name)
        assert not said
