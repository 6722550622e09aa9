import pytest
import torch
from own_parts import Dilated, Einsum, Manhattan, Recency

import clearhead as ch
from clearhead.testing import check_bias, check_engine, check_mask, check_score


def test_score():
    check_score(Manhattan)


def test_mask():
    check_mask(Dilated)


def test_bias():
    check_bias(Recency)


def test_engine():
    check_engine(Einsum())


def test_all_of_them_together():
    x = torch.rand(2, 4, 10, 6)
    out = ch.attention(x, x, x, score=Manhattan(6), mask=Dilated(2) & ch.Causal(), bias=Recency())
    assert out.shape == (2, 4, 10, 6)
    torch.testing.assert_close(
        ch.attention(x, x, x, mask=Dilated(2), engine=Einsum()), ch.attention(x, x, x, mask=Dilated(2))
    )
    with pytest.raises(ch.UnsupportedError, match=r"einsum.*\n.*no dot product"):
        ch.attention(x, x, x, score=Manhattan(6), engine=Einsum())
