"""Statistics of a sequence that is shared out over ranks are those of one process."""

import pytest
from ranks.processes import on_ranks

REFUSED = {
    "some": "of some queries", "unmasked": "leave out only queries and sinks",
    "blocks": "blocks of whole rows", "no reduction": "reductions such as", "step": "cannot have a step",
    "k": "k is 99", "two outputs": "one Output", "unlike": "the call differs", "groups": "the call reads differs",
    "no processes": "without a process group",
}  # fmt: skip


def test_mean_distances_in_bfloat16():
    assert on_ranks(2, "ranks.looked_at:low_precision", 40) == [[], []]


@pytest.mark.parametrize(("ranks", "every"), [(2, 4), (2, 1), (4, 3)])
def test_statistics_are_those_of_one_process(ranks, every):
    """With every score, mask and bias, layouts and messages of few keys, or one in `every` of them."""
    for answer in on_ranks(ranks, "ranks.looked_at:everything", every):
        assert answer["exact"]["wrong"] == [] and answer["exact"]["count"] > 150 // every
        assert answer["ties"] and answer["large"] == []
        assert answer["not_finite"] == [True] * 2
        assert answer["every_key"] < 100 and answer["own_reductions"] == [True] * 4
        said = answer["refused"]
        assert said.keys() == REFUSED.keys()
        assert {name: words for name, words in said.items() if REFUSED[name] not in words} == {}
