"""A sequence that is shared out over ranks gives the numbers of one process, and sends what the plan says."""

import pytest
from ranks.processes import on_ranks


@pytest.mark.parametrize(("ranks", "every"), [(2, 8), (2, 2), (4, 6)])
def test_the_numbers_are_those_of_one_process(ranks, every):
    """Scores × masks of the contract, with biases, sinks, dropout, layouts, both methods, delays; all exact.

    A part of them; with `every` 1 all run.
    """
    answers = on_ranks(ranks, "ranks.cases:everything", every)
    assert not [wrong for answer in answers for wrong in answer["wrong"]][:5]
    assert all(answer["count"] > 60 // every and answer["by_plan"] > 40 // every for answer in answers)


@pytest.mark.parametrize(("ranks", "begin"), [(2, 0), (3, 6000)])
def test_random_problems_are_within_their_budgets(ranks, begin):
    """Of three hundred problems those of self-attention, against the formulas in NumPy; `fuzz.py` draws them."""
    answers = on_ranks(ranks, "ranks.fuzzed:everything", begin, begin + 300)
    assert answers[0]["count"] > 30 and [wrong for answer in answers for wrong in answer["wrong"]][:3] == []
