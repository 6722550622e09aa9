"""Measure, and print a table: python -m benchmarks [--device cuda] [CASE …]."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import torch

import clearhead
from benchmarks import cuda
from benchmarks.cases import CASES
from benchmarks.result import Result


def main(names: list[str]) -> int:
    if names[:1] == ["--device"]:
        if names[1:2] != ["cuda"]:
            print("the devices with a table of their own: cuda", file=sys.stderr)
            return 2
        return on_cuda(names[2:])
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
            torch.set_num_threads(2)  # whatever the case before it took
            result = CASES[name]()
            missed += not result.reached
            print(line(name, result), flush=True)
    return 1 if missed else 0


def on_cuda(names: list[str]) -> int:
    """The rows of a CUDA device; without one, the bars that they should reach."""
    unknown = [name for name in names if name not in cuda.CASES]
    if unknown:
        print(f"no case {unknown[0]!r} for cuda; there are {', '.join(cuda.CASES)}", file=sys.stderr)
        return 2
    rows = {name: cuda.CASES[name] for name in names or cuda.CASES}
    if not cuda.available():
        print("No CUDA device is here: these are the bars, and no figure.\n")
        for name, row in rows.items():
            print(f"{name:18} {row.unmeasured()}")
        return 0
    print("First the contract tests: a wrong answer has no speed.", flush=True)
    tests = [sys.executable, "-m", "pytest", "-q", "--device", "cuda", "tests/test_contract.py"]
    if subprocess.run(tests).returncode:
        print("The tests are red: no figures.", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    print(f"clearhead {clearhead.__version__}, torch {torch.__version__}, {torch.cuda.get_device_name()}\n")
    missed = 0
    with torch.no_grad():
        for name, row in rows.items():
            result = row.measure()
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
