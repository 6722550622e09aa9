"""Modules under tensor parallelism: the numbers of one process, or an error in words on every rank."""

import fuzz_modules
import pytest
from ranks.processes import on_ranks

REFUSED = {
    "a head that is cut": "no whole heads", "a head that one rank has": "no whole heads",
    "keys that are whole": "query heads to",
    "values that are whole": "value heads", "keys and values that are whole": "query heads to",
    "the last layer whole": "W_o by RowwiseParallel", "the last layer alone": "heads side by side",
    "a bias of all heads": "not the same for all heads", "a learnt bias of all heads": "not the same for all heads",
    "a bias of all heads, joined": "not the same for all heads", "a rule of the head": "not the same for all heads",
    "a rule of the head, joined": "not the same for all heads",
    "a bias by a rule of the head": "not the same for all heads",
    "a mask of all heads": "does not fit the scores", "a tensor of all heads": "does not broadcast",
    "a cache beside DTensors": "done", "a mask beside DTensors": "DTensor",
    "the whole again": "done", "additive": "hooks",
    "torch's": "heads side by side", "sinks of all heads": "one logit for each head",
    "a scale of all heads": "cut them as the layers", "a gate of all heads": "cut W_g",
    "a bias of the module": "not the same for all heads", "a norm of all heads": "query_norm has parameters",
    "a temperature of all heads": "temperature has parameters", "a learnt score of all heads": "score has parameters",
    "a learnt bias of every head": "score_bias has parameters", "a norm beside DTensors": "got mixed",
    "a scale beside DTensors": "got mixed", "positions beside DTensors": "got mixed",
    "turns of one's own": "got mixed",
    "a gate beside DTensors": "got mixed",
}  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_numbers_are_those_of_one_process(ranks):
    for found in on_ranks(ranks, "ranks.tensor_parallel:numbers"):
        assert len(found) == 26 and max(found.values()) < 1e-10, found


@pytest.mark.parametrize("ranks", [2, 4])
def test_options_are_those_of_one_process(ranks):
    for found in on_ranks(ranks, "ranks.tensor_parallel:options"):
        assert len(found) == 11 and max(found.values()) < 1e-10, found


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_refused(ranks):
    for said in on_ranks(ranks, "ranks.tensor_parallel:refused"):
        assert {name: words for name, words in said.items() if REFUSED[name] not in words} == {}
        assert said.keys() == REFUSED.keys()


@pytest.mark.parametrize(("first", "count"), [(0, 40), (1000, 440)])
def test_random_modules_are_those_of_one_process(first, count):
    """Options, caches, masks and autocast of `fuzz_modules.py`, shared out at random, with sequences and without."""
    failures, ends = fuzz_modules.over_ranks(first, first + count)
    assert not failures, "\n".join(failures)
    assert ends["right"] > count // 3


def test_heads_that_are_counted_wrongly_are_found_by_random_modules():
    failures, _ = fuzz_modules.over_ranks(0, 8, function="ranks.random_modules:with_two_heads")
    assert failures
