"""A pair of a long recorded call explained, and the command beside that of the report."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead as ch
from benchmarks.measure import interleaved, peak_mib
from benchmarks.result import Result, times

TEXT = "The animal did not cross the street because it was tired, and the street was wide and full of cars."
LENGTH = 16384


class Block(nn.Module):
    """Eight heads of 64, with their projections."""

    def __init__(self) -> None:
        super().__init__()
        self.to_query, self.to_key, self.to_value, self.out = (nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        sides = (
            layer(x).unflatten(-1, (8, 64)).transpose(1, 2) for layer in (self.to_query, self.to_key, self.to_value)
        )
        return self.out(F.scaled_dot_product_attention(*sides, is_causal=True).transpose(1, 2).flatten(2))


def recorded(length: int) -> ch.models.Recording:
    block = Block()
    with torch.no_grad(), ch.watch(block, values=True) as seen:
        block(torch.randn(1, length, 512))
    return seen


def pair() -> Result:
    seen = recorded(LENGTH)
    seconds = interleaved({"explain": lambda: str(seen.explain(0, head=3, query=LENGTH - 7, key=77))}, 9)
    what = f"explaining and printing one pair of a recorded call of {LENGTH:,} tokens"
    return Result(what, seconds["explain"], "s", "≤ 0.5", seconds["explain"] <= 0.5, times(seconds))


def memory() -> Result:
    mib = peak_mib("explain_16384")
    what = f"memory of explaining one pair of {LENGTH:,} tokens (all pairs of the head: 1,024 MiB)"
    return Result(what, mib, "MiB", "≤ 64", mib <= 64, {})


def command() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        page = str(Path(folder) / "report.html")
        start = [sys.executable, "-m", "clearhead.cli"]
        commands = {
            "report": [*start, "report", TEXT, "-o", page],
            "explain": [*start, "explain", "--text", TEXT, "--layer", "2", "--head", "3", "--from", "it"],
        }
        run = {
            name: lambda c=c: subprocess.run(c, check=True, capture_output=True)  # type: ignore[misc]
            for name, c in commands.items()
        }
        seconds = interleaved(run, 5, 1)
    ratio = seconds["explain"] / seconds["report"]
    what = "clearhead explain --text, over clearhead report of the same text"
    return Result(what, ratio, "×", "≤ 1.5", ratio <= 1.5, times(seconds))


CASES: dict[str, Callable[[], Result]] = {
    "explain-pair": pair,
    "explain-memory": memory,
    "explain-command": command,
}
