"""The table of φ: the functions of two numbers whose weighted sum over the features is a score in normal form.

A new φ is an entry here; a header in `engines/native/csrc`, which `problem.h` lists and `kernels.cpp` includes; a file
in `engines/triton/kernels`, with its cases in `score.py` there; and a line in `report/front/weights.js`. Where one is
missing, an import or a build fails, or, for the page, a test.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

Phi = Literal["mul", "tanh_add", "sq_diff"]


class TritonKernels(NamedTuple):
    """What the calls of a φ's kernels in Triton depend on.

    Attributes:
        factor: of ∂φ/∂a and ∂φ/∂b, which the kernels leave to the end.
        exponentials: whether they read e^2a and e^2b.
        overflow: whether ∂φ/∂a may be ∞ for finite a and b.
        scale: of the scores with which a device is proved, given the width.
    """

    factor: float
    exponentials: bool
    overflow: bool
    scale: Callable[[int], float]


class PairFunction(NamedTuple):
    """A function of two numbers, φ(a, b) = f(a ∘ b) where ∘ is ·, + or −, and all that follows from the choice of φ.

    Attributes:
        combine: a ∘ b, of tensors and of steps.
        value: f(x), of tensors and of steps.
        derivative: f′(x), given x, f(x) and where to write it: None for a new tensor, x, or f(x).
        slopes: the roots of the mean squares of ∂φ/∂a and of ∂φ/∂b over all pairs, or bounds of them, given queries
            (Hk, groups, Lq, d) and keys (Hk, 1, Lk, d); they broadcast to (Hk, groups, d).
        page_cost: the time of φ in JavaScript, as a multiple of that of a product.
        triton: see `TritonKernels`.
    """

    combine: Callable[[Any, Any], Any]
    value: Callable[[Any], Any]
    derivative: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    slopes: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    page_cost: int
    triton: TritonKernels


def number_phis(names: Iterable[str], where: str) -> dict[str, int]:
    """The number of each φ. Raises `ImportError` where the names are not those of all φ in order."""
    found = tuple(names)
    if found != get_args(Phi):
        raise ImportError(f"{where} has the φ {found}; expected {get_args(Phi)}.")
    return {name: number for number, name in enumerate(found)}


def _find_rms(tensor: Tensor) -> Tensor:
    return tensor.square().mean(-2).sqrt()


def _find_slopes_of_square(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """4 (mean (q − m)² − 2 mean (q − m) mean (k − m) + mean (k − m)²) is the mean of (2 (q − k))², for any m."""
    middle = key.mean(-2, keepdim=True)
    q, k = query - middle, key - middle
    square = q.square().mean(-2) - 2 * q.mean(-2) * k.mean(-2) + k.square().mean(-2)
    slope = 2 * square.clamp_min(0.0).sqrt()
    return slope, slope


PHIS: dict[Phi, PairFunction] = {
    "mul": PairFunction(
        combine=operator.mul,  # the sum is a matrix product on every engine
        value=lambda x: x,
        derivative=lambda x, value, out: torch.ones_like(x),
        slopes=lambda query, key: (_find_rms(key), _find_rms(query)),
        page_cost=1,
        triton=TritonKernels(factor=1.0, exponentials=False, overflow=False, scale=lambda width: width**-0.5),
    ),
    "tanh_add": PairFunction(
        combine=operator.add,
        value=lambda x: x.tanh(),
        derivative=lambda x, value, out: torch.sub(value.new_ones(()), torch.square(value, out=out), out=out),
        slopes=lambda query, key: (torch.ones_like(key[..., 0, :]),) * 2,
        page_cost=24,
        triton=TritonKernels(factor=4.0, exponentials=True, overflow=False, scale=lambda width: 5 / width),
    ),
    "sq_diff": PairFunction(
        combine=operator.sub,
        value=lambda x: x.square(),
        derivative=lambda x, value, out: torch.mul(x, 2, out=out),
        slopes=_find_slopes_of_square,
        page_cost=8,
        triton=TritonKernels(factor=2.0, exponentials=False, overflow=True, scale=lambda width: -0.5 / width),
    ),
}
NUMBERS = number_phis(PHIS, __name__)
