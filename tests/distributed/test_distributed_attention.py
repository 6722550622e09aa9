"""A sequence that is shared out over ranks gives the numbers of one process, and sends what the plan says."""

import pytest
from ranks.processes import on_ranks


@pytest.mark.parametrize(("ranks", "every"), [(2, 2), (4, 6)])
def test_the_numbers_are_those_of_one_process(ranks, every):
    """Scores × masks of the contract, with biases, sinks, dropout, layouts, both methods, delays; all exact.

    A half and a sixth of them; with `every` 1 all run.
    """
    answers = on_ranks(ranks, "ranks.cases:everything", every)
    assert not [wrong for answer in answers for wrong in answer["wrong"]][:5]
    assert all(answer["count"] > 60 // every and answer["by_plan"] > 40 // every for answer in answers)


def test_messages_of_two_peers_keep_their_order():
    """Of three ranks: keys go to a peer in the step before or after that in which gradients do."""
    assert on_ranks(3, "ranks.cases:in_turns") == [[], [], []]
