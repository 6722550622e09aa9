"""Time and memory over the length, for the course's chapter on scale: `python -m benchmarks.lengths FILE`.

    OMP_NUM_THREADS=1 python -m benchmarks.lengths docs/course/at_scale.json

writes the file that docs/course/10_at_scale.md draws: on one thread, at (1, 4, L, 64), some five minutes and 9 GiB.
Seconds are the processor's, so that what else the machine does disturbs them less; memory is of a process for each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
from benchmarks.measure import extra_mib, interleaved

LENGTHS = (1024, 2048, 4096, 8192, 16384)


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "eager": eager,
    "SDPA": F.scaled_dot_product_attention,
    "clearhead": ch.attention,
    "clearhead, causal": lambda q, k, v: ch.attention(q, k, v, mask=ch.Causal()),
    "clearhead, window of 256": lambda q, k, v: ch.attention(q, k, v, mask=ch.Causal() & ch.SlidingWindow(before=255)),
}


def cpu() -> str:
    """What this processor calls itself, and the instructions that decide its speed here."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    wide = [shown for flag, shown in (("avx512f", "AVX-512"), ("amx_tile", "AMX")) if flag in fields["flags"].split()]
    return " with ".join([fields["model name"], " and ".join(wide)] if wide else [fields["model name"]])


def extra(name: str, length: int) -> float:
    """The extra memory of one call, after a short one."""
    for n in (64, length):
        query, key, value = torch.randn(3, 1, 4, n, 64).unbind()
        found = extra_mib(lambda q=query, k=key, v=value: WAYS[name](q, k, v))
    return found


def measured() -> dict[str, object]:
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "MiB": []} for name in WAYS}
    for length in LENGTHS:
        inputs = torch.randn(3, 1, 4, length, 64).unbind()
        taken = interleaved(
            {name: (lambda way=way, inputs=inputs: way(*inputs)) for name, way in WAYS.items()},
            3 if length > 4096 else 7,
            warm=0,
            clock=time.process_time,
        )
        for name, times in found.items():
            command = [sys.executable, "-m", "benchmarks.lengths", name, str(length)]
            times["seconds"].append(round(taken[name], 6))
            times["MiB"].append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    about = {"cpu": cpu(), "threads": 1, "torch": torch.__version__, "clearhead": ch.__version__}
    return {**about, "shape": [1, 4, "L", 64], "lengths": LENGTHS, "ways": found}


if __name__ == "__main__":
    if len(sys.argv) == 3:
        torch.set_num_threads(1)
        print(round(extra(sys.argv[1], int(sys.argv[2])), 1))
    else:
        Path(sys.argv[1]).write_text(json.dumps(measured(), indent=1) + "\n")
