"""Steps of training under ch.models.monitor, over the same steps alone. A step is a forward and a backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import clearhead as ch
from benchmarks.measure import interleaved
from benchmarks.result import Result, times
from benchmarks.watching import bert, llama

EVERY = 20
NEVER = 2**31  # but for the first


def step(model: Any, run: Any, ids: Tensor) -> None:
    with torch.enable_grad():
        model.zero_grad()
        run(ids).last_hidden_state.square().mean().backward()


def monitored(make: Callable[[], Any], batch: int, length: int, compiled: bool) -> Result:
    """Three copies of a model: alone, monitored and at a step that is monitored, and at one that is not."""
    torch.compiler.reset()
    model, ids = make().train(), torch.randint(0, 1000, (batch, length))
    copies = {name: copy.deepcopy(model) for name in ("plain", "on", "between")}
    with ch.models.monitor(copies["on"], every=1), ch.models.monitor(copies["between"], every=NEVER):
        runs = {name: torch.compile(one, fullgraph=True) if compiled else one for name, one in copies.items()}
        calls = {name: partial(step, copies[name], runs[name], ids) for name in copies}
        seconds = interleaved(calls, 9, 1)
    ratio = seconds["on"] / seconds["plain"]
    average = (seconds["on"] + (EVERY - 1) * seconds["between"]) / EVERY / seconds["plain"]
    what = (
        f"{type(model).__name__}, {batch} × {length} tokens, {'compiled' if compiled else 'eager'}, a step that is "
        f"monitored over one without a monitor; {average:.3f} × on average over {EVERY} steps"
    )
    return Result(what, ratio, "×", "≤ 1.08", ratio <= 1.08, times(seconds))


CASES: dict[str, Callable[[], Result]] = {
    "monitor-bert": partial(monitored, bert, 8, 128, False),
    "monitor-bert-compiled": partial(monitored, bert, 8, 128, True),
    "monitor-llama": partial(monitored, llama, 2, 512, False),
    "monitor-llama-compiled": partial(monitored, llama, 2, 512, True),
    "monitor-llama-2048": partial(monitored, partial(llama, 2), 1, 2048, False),
}
