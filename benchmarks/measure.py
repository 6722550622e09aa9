"""Interleaved medians, and the peak of memory of one call in a process of its own."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Call = Callable[[], Any]


def interleaved(
    calls: dict[str, Call], rounds: int, warm: int = 2, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """The median seconds of each call; a round runs every call once, so that a slow spell of the machine hits all."""
    for call in calls.values():
        for _ in range(warm):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            call()
            times[name].append(clock() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def peak_mib(case: str) -> float:
    """The extra memory of a case of `memory.py`, in MiB, in a fresh process: its peak less what stood before."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", case], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the memory case {case} failed:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def status_kib(field: str) -> int:
    """A figure of this process from Linux: VmRSS is the memory it holds, VmHWM the most it has held."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"no {field} in /proc/self/status")


def extra_mib(call: Call) -> float:
    """Run a call once; how far memory rose above where it stood."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = status_kib("VmRSS")
    call()
    return (status_kib("VmHWM") - before) / 1024
