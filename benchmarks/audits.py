"""Audits of a recording and of a model, over the plain forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch

import clearhead as ch
from benchmarks.measure import interleaved, peak_mib
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


def run_levels(level: Literal["outputs", "layers", "all"], bar: float, length: int = 4096) -> Result:
    """A whole audit of a causal Llama of four layers."""
    model, batch = llama(), {"input_ids": torch.randint(3, 1000, (1, length)), "use_cache": False}
    assert ch.audit(model, batch, ch.Causal(), level=level).ok
    compared = {"plain": lambda: model(**batch), "audit": lambda: ch.audit(model, batch, ch.Causal(), level=level)}
    seconds = interleaved(compared, 3, 1)
    ratio = seconds["audit"] / seconds["plain"]
    told = f"an audit of a Llama on {length} tokens, level {level!r}, over the plain forward"
    return Result(told, ratio, "×", f"≤ {bar}", ratio <= bar, times(seconds))


def measure_memory(level: str) -> Result:
    mib, plain = peak_mib(f"audit_{level}"), peak_mib("no_audit")
    told = f"peak of memory of an audit of a Llama on 4096 tokens, level {level!r}, {mib:.0f} MiB, over a forward's"
    return Result(told, mib / plain, "×", "≤ 2", mib <= 2 * plain, {})


CASES: dict[str, Callable[[], Result]] = {
    "check-same": partial(check, "itself", lambda length: ch.Causal()),
    "check-documents": partial(check, "documents, to which it leaks", documents),
    "audit-outputs": partial(run_levels, "outputs", 9),
    "audit-layers": partial(run_levels, "layers", 22),
    "audit-all": partial(run_levels, "all", 40),
    "audit-memory": partial(measure_memory, "layers"),
    "audit-all-memory": partial(measure_memory, "all"),
    "check-hidden": partial(check, "every key, half of which it hides", lambda length: None),
}
