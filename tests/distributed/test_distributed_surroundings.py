"""Derivatives that are refused in words, compiled callers, sizes of 0, NaN that nobody sees; and bad layouts."""

import numpy as np
import pytest
import torch
from ranks.processes import on_ranks

import clearhead as ch

D = ch.distributed


@pytest.mark.parametrize("compiles", [False, True])
def test_what_surrounds_a_call(compiles):
    for said in on_ranks(2, "ranks.surroundings:everything", compiles):
        assert all(said["nothing"]) and len(said["nothing"]) == 16
        assert all(said["not_finite"]) and len(said["not_finite"]) == 20
        assert said.get("compiled", []) == [] and ("compiled" in said) == compiles
        assert said["layouts"] == [True] * 4
        for name, words in said["derivatives"].items():
            expected = {"twice": "differentiable once", "batched": True}.get(name.split()[0], "torch.func, forward")
            assert words is True if expected is True else expected in words, (name, words)


def test_ranks_that_need_unlike_numbers_of_messages():
    for found in on_ranks(3, "ranks.surroundings:unlike_turns"):
        assert all(found) and len(found) == 18


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: D.Layout(None, 2),
        lambda: D.Layout([3, 4], 2),
        lambda: D.Layout([["x"], [range(4)]], 2),
        lambda: D.Layout([[range(0, 8, 2)], [range(8, 16)]], 2),
        lambda: D.Layout([[slice(0, 8)], [slice(8, 16)]], 2),
        lambda: D.Contiguous(2.5, 2),
        lambda: D.Contiguous(["x"], 1),
        lambda: D.Balanced(ch.Causal(), 8, 2, batch="x"),
        lambda: D.ZigZag(8, 2).own(2),
        lambda: D.ZigZag(8, 2).count("x"),
        lambda: D.ZigZag(8, 2).positions(rank=-1),
        lambda: D.ZigZag(8, 2).shard(torch.ones(8), 1),
        lambda: D.ZigZag(8, 2).shard(torch.ones(8), None),
    ],
)
def test_a_wrong_layout_is_refused_in_words(wrong):
    with pytest.raises(ch.ClearheadError, match=r"expected|whole sequence"):
        wrong()


def test_numbers_of_positions_by_numpy():
    assert D.Contiguous(np.array([3, 5]), 2).chunks == D.Contiguous([3, 5], 2).chunks
    assert D.ZigZag(np.int64(8), 2).chunks == D.ZigZag(8, 2).chunks
