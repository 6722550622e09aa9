"""The tokens that two texts have in common."""

import itertools
import random

import pytest

import clearhead as ch


def test_equal_tokens_in_one_order():
    """Of random texts: equal tokens at ascending positions, the other way round as many of one text as of itself."""
    draw = random.Random(0)
    for _ in range(200):
        one, other = (["x", *draw.choices("abcd", k=draw.randint(1, 12))] for _ in range(2))
        mine, theirs = ch.models.match_tokens(one, other)
        assert len(mine) == len(theirs) > 0
        assert [one[i] for i in mine] == [other[i] for i in theirs]
        for side in (mine, theirs):
            assert all(a < b for a, b in itertools.pairwise(side))
        assert ch.models.match_tokens(one, one) == (list(range(len(one))),) * 2


def test_a_token_that_is_put_in_left_out_or_replaced():
    assert ch.models.match_tokens(list("abcd"), list("abxcd")) == ([0, 1, 2, 3], [0, 1, 3, 4])
    assert ch.models.match_tokens(list("abcd"), list("bcd")) == ([1, 2, 3], [0, 1, 2])
    assert ch.models.match_tokens(list("abcd"), list("axcd")) == ([0, 2, 3], [0, 2, 3])
    assert ch.models.match_tokens(iter([5, 7]), (7, 9)) == ([1], [0])


def test_tokens_that_replace_each_other():
    """Between two matches and at both ends, where the stretches are as long in both texts."""

    def matched(one, other):
        return ch.models.match_tokens(list(one), list(other), replaced=True)

    assert matched("abcd", "axcd") == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert matched("xybc", "uvbcdd") == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert matched("zabcx", "abcuzy") == ([1, 2, 3], [0, 1, 2])  # other lengths correspond to nothing
    assert matched("abxyc", "qabuvc") == ([0, 1, 2, 3, 4], [1, 2, 3, 4, 5])
    with pytest.raises(ch.ClearheadError, match="no token in common"):
        matched("ab", "cd")


def test_a_frequent_token_counts_in_a_long_text():
    """difflib leaves out frequent ones of more than 200 unless it is told not to."""
    text = ["the", "cat"] * 300
    assert len(ch.models.match_tokens(text, [*text, "sat"])[0]) == 600
