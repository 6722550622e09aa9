"""The masks of a watched model checked, over the plain forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import clearhead as ch
from benchmarks.measure import interleaved
from benchmarks.result import Result, times
from benchmarks.watching import llama

BAR = 0.5


def check(what: str, expected: Callable[[int], ch.extend.Mask | None], length: int = 4096) -> Result:
    """A causal Llama beside another mask."""
    model, ids = llama(), torch.randint(0, 1000, (1, length))
    with ch.watch(model) as seen:
        model(ids)
    mask = expected(length)
    assert ch.audit(seen, mask).ok == (what == "itself")
    seconds = interleaved({"plain": lambda: model(ids), "check": lambda: ch.audit(seen, mask)}, 7, 1)
    ratio = seconds["check"] / seconds["plain"]
    told = f"Llama on {length} tokens, its causal mask checked beside {what}, over the plain forward"
    return Result(told, ratio, "×", f"≤ {BAR}", ratio <= BAR, times(seconds))


def documents(length: int) -> ch.extend.Mask:
    return ch.Causal() & ch.Documents.from_lengths([length // 4] * 4)


CASES: dict[str, Callable[[], Result]] = {
    "check-same": partial(check, "itself", lambda length: ch.Causal()),
    "check-documents": partial(check, "documents, to which it leaks", documents),
    "check-hidden": partial(check, "every key, half of which it hides", lambda length: None),
}
