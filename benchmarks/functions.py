"""Scores, biases and masks by functions: beside the same as clearhead's own, and beside plain PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

import clearhead as ch
from benchmarks.measure import interleaved
from benchmarks.result import Result, agree, times

LENGTH, DOCUMENT = 2048, 256


class Product(ch.extend.Score):
    """A plain product by `tile()` alone."""

    def tile(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query @ key.mT / 8


@torch.no_grad()
def positions() -> Result:
    """ALiBi inside of a function that its user compiled, a softcap and documents as functions."""
    torch.set_num_threads(1)
    q, k, v = torch.randn(3, 1, 8, LENGTH, 64)
    slopes, ids = 2.0 ** -torch.arange(1, 9.0), torch.arange(LENGTH) // DOCUMENT
    own = {"score": ch.Dot(softcap=20.0), "bias": ch.ALiBi(8), "mask": ch.Documents(ids[None])}
    change = lambda s, b, h, i, j: 20 * torch.tanh(s / 20) - slopes[h] * (i - j).abs()  # noqa: E731
    mask = ch.MaskFunction(lambda b, h, i, j: ids[i] == ids[j])
    functions = {"score": ch.Dot().then(torch.compile(change, dynamic=True)), "mask": mask}
    calls = {"own": lambda: ch.attention(q, k, v, **own), "functions": lambda: ch.attention(q, k, v, **functions)}
    agree(calls["functions"](), calls["own"]())
    return _slower(f"ALiBi, softcap and documents as functions at (1,8,{LENGTH},64), 1 thread", 6, calls)


@torch.enable_grad()
def product(threads: int) -> Result:
    """A training step with a product by `tile()` alone."""
    torch.set_num_threads(threads)
    q, k, v = (torch.randn(1, 8, 1024, 64, requires_grad=True) for _ in range(3))
    grad, score = torch.randn(1, 8, 1024, 64), Product()
    calls: dict[str, Callable[[], object]] = {
        "eager": lambda: ((q @ k.mT / 8).softmax(-1) @ v).backward(grad),
        "tile": lambda: ch.attention(q, k, v, score=score).backward(grad),
    }
    how = "1 thread" if threads == 1 else f"{threads} threads"
    return _slower(f"a product by tile() alone, forward + backward at (1,8,1024,64), {how}", 1.3, calls)


def _slower(what: str, bar: float, calls: dict[str, Callable[[], object]]) -> Result:
    """The second call's time over that of the first: on one thread, the time of the CPU."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = interleaved(calls, 15, 3, clock)
    one, other = seconds.values()
    return Result(what, other / one, "×", f"≤ {bar}", other / one <= bar, times(seconds))


CASES: dict[str, Callable[[], Result]] = {
    "by-functions": positions,
    "by-tile": partial(product, 1),
    "by-tile-2": partial(product, 2),
}
