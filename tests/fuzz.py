"""Random problems in random surroundings, every engine against the formulas in NumPy: outputs, gradients and looks.

    python tests/fuzz.py 10000                   the first ten thousand
    python tests/fuzz.py 100000 --from 25000     those from number 25000 on, as after an interruption
    python tests/fuzz.py --only 1234             one again, shown
    python tests/fuzz.py 1000 --instructions avx2 --jobs 2

A problem follows from its number (`fuzzing/draw.py`). The truth is `oracle.py`; the budget of an error is derived from
the problem (`fuzzing/budget.py`); what may be refused is in `fuzzing/table.py`. Problems run in child processes: one
that ends its process is a failure too, and the next one goes on after it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from clearhead.problem import regions

CHUNK = 500  # problems to a child process
PATIENCE = 120.0  # seconds that one problem may take


def failures_of(number: int) -> Iterator[str]:
    """What fails in one problem, here."""
    from fuzzing.attend import check_attend
    from fuzzing.draw import draw
    from fuzzing.looks import check_looks
    from fuzzing.statistics import check_statistics

    spec = draw(number)
    before = regions.BUDGET, regions.LOOK
    regions.BUDGET = regions.LOOK = spec.blocks
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for check in (check_attend,) if spec.task == "attend" else (check_looks, check_statistics):
                for failure in check(spec):
                    yield f"{spec}\n    {failure}"
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)
        place = next((f for f in reversed(at) if "clearhead" in f.filename), at[-1])
        words = str(error).splitlines()[:1]
        yield f"{spec}\n    {type(error).__name__}: {''.join(words)} ({Path(place.filename).name}:{place.lineno})"
    finally:
        regions.BUDGET, regions.LOOK = before


def use_instructions(name: str) -> None:
    """Kernels of one instruction set, from here on."""
    from clearhead.engines.native import bindings

    kernels = bindings.chosen(name)
    bindings.chosen = lambda instructions=None: kernels


def use_device(options: argparse.Namespace) -> None:
    import torch
    from fuzzing.table import ON_DEVICES, SURROUNDINGS

    torch.set_default_device(options.device)
    options.without = ",".join([options.without, *(name for name in SURROUNDINGS if name not in ON_DEVICES)])


def child(first: int, stop: int, at: str, without: set[str]) -> None:
    """Run some problems, without those of these layouts, surroundings and tasks."""
    from fuzzing.draw import draw

    def left(number: int) -> Iterator[str]:
        if not without or not without & {(spec := draw(number)).layout, spec.surroundings, spec.task}:
            yield from failures_of(number)

    run_all(first, stop, at, left)


def run_all(first: int, stop: int, at: str, failures_of: Callable[[int], Iterator[str]]) -> None:
    """Run some problems: the one at work is written to a file, what fails to the standard output."""
    with open(at, "r+b", buffering=0) as place:
        for number in range(first, stop):
            place.seek(0)
            place.write(f"{number:<20}".encode())
            for failure in failures_of(number):
                print(json.dumps(failure), flush=True)
        place.seek(0)
        place.write(f"{stop:<20}".encode())


class Child:
    """A process that runs some problems, and where it is."""

    def __init__(self, first: int, stop: int, options: list[str], program: str) -> None:
        self.stop, self.number, self.since = stop, first, time.monotonic()
        self.at = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115 - closed in results()
        self.out, self.errors = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.at.write(f"{first:<20}".encode())
        self.at.flush()
        command = [sys.executable, program, "--child", f"{first}:{stop}:{self.at.name}", *options]
        self.process = subprocess.Popen(command, stdout=self.out, stderr=self.errors)

    def look(self) -> None:
        """Where it is; one that is at the same problem for too long is ended."""
        number = int(Path(self.at.name).read_text().strip() or self.number)
        if number != self.number:
            self.number, self.since = number, time.monotonic()
        elif time.monotonic() - self.since > PATIENCE:
            self.process.kill()

    def results(self) -> list[str]:
        """What failed; with it, the problem that ended the process, if one did."""
        self.look()
        Path(self.at.name).unlink()
        self.out.seek(0)
        self.errors.seek(0)
        with self.at, self.out, self.errors:
            found = [json.loads(line) for line in self.out if line.endswith("\n")]
            last = "".join(self.errors.readlines()[-3:]).strip()
        code = self.process.returncode
        if code:
            with contextlib.suppress(ValueError):
                last = f"{signal.Signals(-code).name} {last}"
            found.append(f"problem {self.number} ended its process ({code}): {last}")
        return found


def fuzz(
    first: int, stop: int, jobs: int = 1, options: Iterable[str] = (), progress: Any = None, program: str = __file__
) -> list[str]:
    """The failures of the problems from `first` up to `stop`, each chunk in a process of its own."""
    failures: list[str] = []
    waiting = [(a, min(a + CHUNK, stop)) for a in range(first, stop, CHUNK)][::-1]
    running: list[Child] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(Child(*waiting.pop(), list(options), program))
            time.sleep(0.05)
            for one in list(running):
                one.look()
                if one.process.poll() is None:
                    continue
                running.remove(one)
                found = one.results()
                failures += found
                for failure in found if progress else ():
                    print(failure, flush=True)
                if one.process.returncode and one.number + 1 < one.stop:
                    waiting.append((one.number + 1, one.stop))
            if progress:
                progress(min([*(one.number for one in running), *(a for a, _ in waiting), stop]))
    finally:
        for one in running:
            one.process.kill()
            one.process.wait()
            failures += one.results()[:-1]
    return failures


def arguments(about: str | None, count: int = 1000) -> argparse.ArgumentParser:
    """What each program of random problems is given."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=count, help="how many problems, from number --from on")
    parser.add_argument("--from", "--first", dest="first", type=int, default=0, metavar="N")
    parser.add_argument("--only", type=int, metavar="N", help="run and show one problem, in this process")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--instructions", help="kernels of one instruction set: baseline, avx2, avx512 or avx512_bf16")
    parser.add_argument(
        "--without", default="", help="layouts, surroundings or tasks to leave out, with commas between"
    )
    parser.add_argument("--device", help="another device, such as cuda, in the surroundings that are of any device")
    options = parser.parse_args()
    if options.device:
        use_device(options)
    if options.instructions and (options.child or options.only is not None):
        use_instructions(options.instructions)
    if options.child:
        first, stop, at = options.child.split(":")
        child(int(first), int(stop), at, set(filter(None, options.without.split(","))))
        return 0
    if options.only is not None:
        from fuzzing.draw import draw

        print(draw(options.only))
        found = [failure.partition("\n")[2] for failure in failures_of(options.only)]
        print("\n".join(found) or "    all is within its budget")
        return 1 if found else 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    extra = ["--instructions", options.instructions] if options.instructions else []
    extra += ["--without", options.without, *(["--device", options.device] if options.device else [])]
    stop, begun, reached = options.first + options.count, time.monotonic(), options.first

    def progress(number: int) -> None:
        nonlocal reached
        if number // 500 != reached // 500:
            rate = (number - options.first) / (time.monotonic() - begun)
            print(f"… {number} of {stop}, {rate:.0f} a second", file=sys.stderr, flush=True)
        reached = number

    try:
        failures = fuzz(options.first, stop, options.jobs, extra, progress)
    except KeyboardInterrupt:
        print(f"stopped; go on with: {stop - reached} --from {reached}")
        return 130
    rate = options.count / (time.monotonic() - begun)
    print(f"{options.count} problems, {rate:.0f} a second, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
