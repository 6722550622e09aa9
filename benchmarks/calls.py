"""Calls of clearhead's Python functions in a small call, where they take most of the time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import clearhead as ch
from benchmarks.result import Result

PACKAGE = str(Path(ch.__file__).parent)
UNEQUAL = [64, 40, 17, 52]  # the lengths of four prompts


def count_calls(run: Callable[[], object]) -> int:
    """How often `run` calls a Python function of the package."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def measure_calls(what: str, bar: int, run: Callable[[], object]) -> Result:
    for _ in range(3):  # what is kept between calls is there
        run()
    calls = count_calls(run)
    return Result(f"calls of clearhead's functions in {what}", calls, "calls", f"≤ {bar}", calls <= bar, {})


def count_in_attention(bar: int) -> Result:
    q = torch.randn(1, 8, 16, 64)
    return measure_calls("attention(Causal()) at (1,8,16,64)", bar, lambda: ch.attention(q, q, q, mask=ch.Causal()))


def count_in_step(what: str, bar: int, capacity: int | None = None, lengths: list[int] | None = None) -> Result:
    """Calls in one step of decoding, after prompts of 64 tokens or of these lengths."""
    attend, cache = ch.nn.MultiHeadAttention(256, 8).eval(), ch.nn.KeyValueCache(capacity)
    prompts, token = torch.randn(4, 64, 256), torch.randn(4, 1, 256)
    with torch.no_grad():
        attend(prompts, prompts, prompts, ch.Causal(), cache=cache, new_lens=lengths)
        step = partial(attend, token, token, token, ch.Causal(), cache=cache)
        return measure_calls(f"a step of MultiHeadAttention, {what}", bar, step)


CASES: dict[str, Callable[[], Result]] = {
    "calls-causal": lambda: count_in_attention(55),
    "calls-step": lambda: count_in_step("a cache that grows", 70),
    "calls-step-capacity": lambda: count_in_step("a cache with a capacity", 100, 256),
    "calls-step-unequal": lambda: count_in_step("prompts of unequal lengths", 100, None, UNEQUAL),
    "calls-step-capacity-unequal": lambda: count_in_step("unequal lengths with a capacity", 100, 256, UNEQUAL),
}
