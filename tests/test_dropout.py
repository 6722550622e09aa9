"""Dropout: a hash of the pair, the same on every engine, in any block, forward and backward."""

import math

import pytest
import torch

import clearhead as ch
from clearhead.base import dropout
from clearhead.base.shapes import Sizes
from clearhead.problem import regions

EVERY = slice(None)


def kept(seed=0, p=0.3, shape=(2, 3, 200, 300), sides=None):
    origin = sides and tuple(range(size)[side] for size, side in zip(shape, sides, strict=True))
    return dropout.factors(torch.tensor(seed), p, Sizes(*shape), origin, torch.float64) > 0


def by_the_words(seed, p, b, h, i, j):
    """The module's docstring, in Python's integers."""
    word = 2**32 - 1

    def mix(x):
        x = (x ^ (x >> 16)) * 0x7FEB352D & word
        x = (x ^ (x >> 15)) * 0x846CA68B & word
        return x ^ (x >> 16)

    row = mix(seed & word)
    for part in (seed >> 32 & word, b, h, i):
        row = mix((row + part) & word)
    x = (row + mix((j + 0x9E3779B9) & word)) & word
    x = (x ^ (x >> 16)) * 0x7FEB352D & word
    x = (x ^ (x >> 15)) * 0x846CA68B & word
    return (x - 2**32 if x >= 2**31 else x) >= round(p * 2**32) - 2**31


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, -(2**63), 2**63 - 1, 123456789012345])
def test_the_hash_is_the_documented_one(seed):
    found = kept(seed, 0.3, (2, 3, 7, 9))
    for place in ((0, 0, 0, 0), (1, 2, 6, 8), (1, 0, 3, 5), (0, 2, 6, 0)):
        assert bool(found[place]) == by_the_words(seed, 0.3, *place)
    flat = [by_the_words(seed, 0.3, b, h, i, j) for b in range(2) for h in range(3) for i in range(7) for j in range(9)]
    assert found.flatten().tolist() == flat


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_the_share_is_p_in_every_row_and_column(p):
    dropped = 1 - kept(5, p).double()
    count, spread = dropped.numel(), math.sqrt(p * (1 - p))
    assert abs(dropped.mean() - p) < 5 * spread / math.sqrt(count)
    for dim in (2, 3):
        means = dropped.mean(dim)
        length = dropped.shape[dim]
        assert (means - p).abs().max() < 6 * spread / math.sqrt(length) + 2 / length
        assert means.std() == pytest.approx(spread / math.sqrt(length), rel=0.15)


def test_rows_columns_heads_and_seeds_are_unrelated():
    fates = (kept().double() - 0.7) / math.sqrt(0.21)
    one = fates[0, 0]
    for pairs in (one @ one.T / 300, one.T @ one / 200):
        apart = pairs - pairs.diag().diag()
        assert apart.abs().max() < 6 / math.sqrt(200)
    others = [fates[0, 1], fates[1, 0], (kept(1).double()[0, 0] - 0.7) / math.sqrt(0.21)]
    assert all(abs((one * other).mean()) < 5 / math.sqrt(one.numel()) for other in others)
    square = (
        one[:-1, :-1] * one[1:, 1:] * one[:-1, 1:] * one[1:, :-1]
    )  # what a sum of a row's and a column's would show
    assert abs(square.mean()) < 5 / math.sqrt(square.numel())


def test_a_part_is_that_part_of_the_whole():
    whole, sides = kept(), (slice(1, 2), slice(0, 3, 2), slice(20, 150), slice(7, 300, 3))
    assert torch.equal(kept(sides=sides), whole[sides])


def test_the_seed_is_torchs_and_the_engine_does_not_matter(monkeypatch):
    x = torch.rand(2, 4, 50, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for engine in ("reference", "tiled", None):
        torch.manual_seed(3)
        found.append(ch.attention(x, x, x, dropout_p=0.4, mask=ch.Causal(), engine=engine))
    monkeypatch.setattr(regions, "BUDGET", 100)
    torch.manual_seed(3)
    found.append(ch.attention(x, x, x, dropout_p=0.4, mask=ch.Causal()))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
    assert not torch.allclose(ch.attention(x, x, x, dropout_p=0.4, mask=ch.Causal()), found[0])
    assert "dropout" in ch.plan(x, x, x, dropout_p=0.4).declined["sdpa"][0]


def test_the_mean_is_the_output_without():
    x = torch.randn(1, 1, 6, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    value = x.expand(4000, 1, 6, 4)
    mean = ch.attention(value, value, value, dropout_p=0.3).mean(0)
    torch.testing.assert_close(mean, ch.attention(x, x, x)[0], atol=0.05, rtol=0)
