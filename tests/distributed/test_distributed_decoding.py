"""Partials of ranks merge to the attention of one process, the same on every rank to the bit."""

import pytest
from ranks.processes import on_ranks

REFUSED = {
    "no partial": "takes the result of partial()", "number": "takes a process group", "gradient": "no gradients",
    "values": "dtype of the output differs", "many": "the shape of the output differs",
    "shapes": "the shape of the output differs", "dtypes": "dtype of the output differs", "after": "(1, 2, 1, 8)",
}  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_spread_cache_gives_the_output_of_one_process(ranks):
    for rank, answer in enumerate(on_ranks(ranks, "ranks.decoding:everything")):
        assert answer["decoded"] == []
        assert answer["groups"] == [True] * (2 if rank < 2 else 0)
        said = answer["refused"]
        assert said.keys() == REFUSED.keys()
        assert {name: words for name, words in said.items() if REFUSED[name] not in words} == {}
