"""Planted faults: the strict interpreter finds each, where Triton's own would let it pass."""

import pytest
import torch
import triton
import triton.language as tl
from interpreted.strict import BoundsError, RaceError


@triton.jit
def race(x, to, n, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(to + places, tl.load(x + places) + tl.program_id(0))


@triton.jit
def read_of_another(x, to, n, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to + places, tl.load(to + (places + BLOCK) % n))


@triton.jit
def missing_mask(x, to, n, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to + places, tl.load(x + places), mask=places < n)


@triton.jit
def off_by_one(x, to, n, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to + places, tl.load(x + places, mask=places <= n), mask=places < n)


@triton.jit
def wrong_stride(x, to, n, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(to + places, tl.load(x + places * (n // 16), mask=places < 50, other=0.0))


@triton.jit
def no_barrier(x, to, n, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    for _ in range(2):
        tl.store(to + places, tl.load(to + (BLOCK - 1 - places)) + 1.0)


@triton.jit
def one_place_twice(x, to, n, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(to + places // 2, tl.load(x + places))


FAULTS = {
    race: (RaceError, 2),
    read_of_another: (RaceError, 2),
    missing_mask: (BoundsError, 2),
    off_by_one: (BoundsError, 2),
    wrong_stride: (BoundsError, 1),
    no_barrier: (RaceError, 1),
    one_place_twice: (RaceError, 1),
}


@pytest.mark.parametrize("kernel", FAULTS, ids=lambda kernel: kernel.fn.__name__)
def test_a_planted_fault_is_found(kernel):
    error, programs = FAULTS[kernel]
    x, to = torch.randn(100), torch.zeros(128)
    with pytest.raises(Exception) as caught:  # Triton wraps what a program raises in an error of its own
        kernel[(programs,)](x, to, 100, BLOCK=64)
    found = [caught.value, caught.value.__cause__]
    assert any(isinstance(one, error) for one in found), found


def test_a_grid_may_be_too_large():
    with pytest.raises(BoundsError):
        race[(1, 65536)](torch.zeros(64), torch.zeros(64), 64, BLOCK=64)


@triton.jit
def least(x, to):
    tl.store(to, tl.minimum(tl.load(x), 1.0))


@triton.jit
def largest(x, to):
    tl.store(to, tl.max(tl.load(x + tl.arange(0, 2)), 0))


@triton.jit
def undefined(x, to):
    tl.store(to, tl.load(x, mask=tl.program_id(0) > 0))


@triton.jit
def product(x, to, PRECISION: tl.constexpr):
    places = tl.arange(0, 16)
    at = places[:, None] * 16 + places[None, :]
    tl.store(to + at, tl.dot(tl.load(x + at), tl.load(x + at), input_precision=PRECISION))


def test_numbers_are_those_of_a_gpu():
    nan, to = torch.tensor([torch.nan, 0.5]), torch.zeros(1)
    for kernel, expected in ((least, 1.0), (largest, 0.5)):
        kernel[(1,)](nan, to)
        assert to.item() == expected  # a minimum or maximum of NaN and a number is the number
    undefined[(1,)](torch.zeros(1), to)
    assert to.isnan().item()
    x, rounded = torch.randn(16, 16), torch.zeros(16, 16)
    product[(1,)](x, rounded, PRECISION="tf32")
    assert 1e-4 < (rounded - x @ x).abs().max() < 1e-1  # 11 bits of each number
