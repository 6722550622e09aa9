"""Measure, and print a table: python -m benchmarks [CASE …]."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import torch

import clearhead
from benchmarks.cases import CASES
from benchmarks.result import Result


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in CASES]
    if unknown:
        print(f"no case {unknown[0]!r}; there are {', '.join(CASES)}", file=sys.stderr)
        return 2
    print("First the contract tests: a wrong answer has no speed.", flush=True)
    if subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", "2", "tests/test_contract.py"]).returncode:
        print("The tests are red: no figures.", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    torch.set_num_threads(2)
    print(header())
    missed = 0
    with torch.no_grad():
        for name in names or CASES:
            result = CASES[name]()
            missed += not result.reached
            print(line(name, result), flush=True)
    return 1 if missed else 0


def header() -> str:
    cpu = next(
        (row.split(":")[1].strip() for row in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in row),
        platform.processor(),
    )
    versions = f"clearhead {clearhead.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"{versions}\n{cpu}, {torch.backends.cpu.get_cpu_capability()}, 2 threads, float32; medians, interleaved\n"


def line(name: str, result: Result) -> str:
    times = ", ".join(f"{who} {value:.3g} ms" for who, value in result.times.items())
    bar = f"(bar {result.bar}{'' if result.reached else ': MISSED'})" if result.bar else ""
    return f"{name:16} {result.value:8.2f} {result.unit} {bar}\n{'':16} {result.what}{': ' + times if times else ''}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
