"""Compiles every kernel of engines/triton for devices that are not here, and holds what their machine code needs.

`make cuda-check` compiles each kernel as a call would, for each score and a few dtypes and widths, and compares
registers, spilled bytes, shared memory and occupancy with the table beside the kernels, compiled.txt; `--write` writes
it anew. No device is needed: Triton brings `ptxas`, and LLVM for AMD. `--only sm_90 forward` compiles what has these
words in its line.

It fails where something does not compile, spills more than the table says, has more shared memory than the device, or
differs from the table in another way. That a kernel compiles does not show that it is right: tests/interpreted does.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "triton"))  # compiled once

import triton
from triton.backends.compiler import GPUTarget

import clearhead as ch
from clearhead.engines.triton import launch
from clearhead.engines.triton.engine import Triton
from clearhead.problem.partial import Rows
from clearhead.problem.problem import Problem, make_problem
from clearhead.problem.summary import Sent, Summary

TABLE = Path(launch.__file__).with_name("compiled.txt")
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# threads, registers, shared bytes and blocks of a multiprocessor; shared bytes that a block may have
SM_80 = (2048, 65536, 164 * 1024, 32, 163 * 1024)
SM_90 = (2048, 65536, 228 * 1024, 32, 227 * 1024)
DEVICES = {"sm_80": SM_80, "sm_90": SM_90, "sm_100": SM_90, "gfx942": None}
LDS = 64 * 1024
ONCE = ("lay", "weigh", "poison", "join")  # kernels that a call of one kind shows
SCORES = ("mul", "tanh_add", "sq_diff")
OPERANDS = (("float32", 64), ("bfloat16", 128))  # float16 takes the instructions of bfloat16


class Used(NamedTuple):
    """What a compiled kernel needs: registers, bytes of a thread's registers that are spilled, shared bytes, and of
    the warps that a multiprocessor could hold the share that it then holds, in percent (−1: not counted)."""

    registers: int
    spilled: int
    shared: int
    occupancy: int


class Driver:
    """A device that is not here, as far as Triton asks about it before it starts a kernel."""

    def __init__(self, name: str) -> None:
        self.number = list(DEVICES).index(name)  # a process keeps what it has compiled for a number
        self.target = GPUTarget("hip", name, 64) if name.startswith("gfx") else GPUTarget("cuda", int(name[3:]), 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def is_active(self) -> bool:
        return True

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def problem(phi: str, dtype: torch.dtype, width: int, plain: bool, queries: int = 128, keys: int = 128) -> Problem:
    """A call with all that a kernel may have code for, or with none of it."""
    query, key, value = (
        torch.zeros(2, heads, length, width, dtype=dtype) for heads, length in ((4, queries), (2, keys), (2, keys))
    )
    score: ch.extend.Score = ch.Dot()
    if phi == "tanh_add":
        score = ch.Additive.from_weights(None, None, torch.ones(width, dtype=dtype))
    elif phi == "sq_diff":
        score = ch.Gaussian()
    if plain:
        return make_problem(query, key, value, score=score)
    mask = ch.SlidingWindow(before=20) | ch.PrefixLM(torch.tensor([3, 4]))
    bias, sinks = ch.ALiBi(4), torch.zeros(4)
    given: dict[str, Any] = {"mask": mask, "bias": bias, "sinks": sinks, "dropout_p": 0.1, "align": "lower_right"}
    return make_problem(query, key, value, score=score, **given)


def calls(phi: str, dtype: torch.dtype, width: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The names of what is compiled, and a call that starts it."""
    for plain in (True, False):
        name, given = "plain" if plain else "all", problem(phi, dtype, width, plain)
        lead, length = given.sizes.shape[:3], given.sizes.queries
        row, position = torch.zeros(lead), torch.zeros(2, 1, length, dtype=torch.int64)
        wanted = (True, True, True, phi != "mul", False, not plain, False)
        largest = torch.zeros(*lead, 3)
        by_key, cells = torch.zeros(2, 4, length), torch.zeros(2, 4, 4, 4)
        sent = Sent(row, row, position, row, row.long(), largest, largest.long(), by_key, cells, (32, 32), row)
        rows, grad = Rows(row, row, row), torch.zeros(*lead, width)
        yield name, partial(launch.output, given, True)
        yield name, partial(launch.gradients, given, rows, grad, wanted, None if plain else sent)
    summary = Summary(rows=True, entropy=True, distance=position, best=True, top=16, received=True)
    summary = summary._replace(mean=(16, 16), peak=(16, 16))
    without = given._replace(seed=None, dropout_p=0.0, value=None)
    yield "statistics", partial(launch.statistics, without, summary)
    yield "decode", partial(launch.output, problem(phi, dtype, width, True, queries=1, keys=4096), False)


def used(kernel: Any, device: str, warps: int) -> Used:
    """What the machine code needs."""
    if device.startswith("gfx"):
        text = kernel.asm["amdgcn"]

        def one(name: str) -> int:
            found = re.search(rf"\.{name}:\s+(\d+)", text)
            return int(found.group(1)) if found else 0

        return Used(one("vgpr_count"), one("private_segment_fixed_size"), max(kernel.metadata.shared, 0), -1)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        listing = [str(BIN / "cuobjdump"), "--dump-resource-usage", file.name]
        out = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    line = [line for line in out.splitlines() if "REG:" in line][-1]
    got = {name: int(number) for name, number in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", line)}
    shared = max(kernel.metadata.shared, got["SHARED"])
    return Used(got["REG"], max(got["STACK"], got["LOCAL"]), shared, occupancy(got["REG"], shared, warps, device))


def occupancy(registers: int, shared: int, warps: int, device: str) -> int:
    """The share of a multiprocessor's warps that its registers and shared memory have room for, in percent."""
    limits = DEVICES[device]
    assert limits is not None
    threads, all_registers, all_shared, blocks, _ = limits
    of_warp = -(-registers * 32 // 256) * 256
    fit = min(threads // (32 * warps), all_registers // of_warp // warps, all_shared // (shared + 1024), blocks)
    return round(100 * fit * warps * 32 / threads)


def compiled(device: str, only: list[str]) -> Iterator[tuple[str, Used]]:
    """Each kernel of a device by its name, and what it needs."""
    triton.runtime.driver.set_active(Driver(device))
    launch.backend = lambda: launch.AMD if device.startswith("gfx") else launch.NVIDIA
    done: set[str] = set()
    found: list[tuple[str, Used]] = []
    for phi, (dtype, width) in itertools.product(SCORES, OPERANDS):
        for kind, call in calls(phi, getattr(torch, dtype), width):
            if device.startswith("gfx") and kind != "plain":  # LLVM takes minutes for each of the others
                continue
            about = f"{phi:8} {dtype:8} {width:3}"

            def compile_alone(  # in place of `launch.start`
                kernel: Any,
                programs: Any,
                *arguments: Any,
                warps: int = 4,
                about: str = about,
                kind: str = kind,
                **constants: Any,
            ) -> None:
                name = kernel.fn.__name__.removesuffix("_kernel")
                if name == "poison" and kind == "plain" and not device.startswith("gfx"):
                    return  # the next kind looks at the keys, too
                line = f"{device:6} {name:8} {about} {'' if name in ONCE else kind}".rstrip()
                if line not in done and all(word in line.split() for word in only):
                    done.add(line)
                    result = kernel.warmup(*arguments, grid=programs, num_warps=warps, num_stages=1, **constants)
                    found.append((line, used(result, device, warps)))

            launch.start = compile_alone
            call()
            yield from found
            found.clear()


def written(line: str, needs: Used) -> str:
    return f"{line:46} {needs.registers:4} {needs.spilled:6} {needs.shared:7} {needs.occupancy:4}"


HEAD = f"{'device kernel   score    dtype  width call':46} regs  spill  shared  occ"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table anew")
    parser.add_argument("--only", nargs="*", default=[], help="compile what has these words in its line")
    options = parser.parse_args()
    assert Triton.name == "triton"
    before = dict.fromkeys(TABLE.read_text(encoding="utf-8").splitlines()) if TABLE.exists() else {}
    lines, wrong, began = [HEAD], [], time.time()
    devices = [name for name in DEVICES if not set(options.only) & set(DEVICES) or name in options.only]
    for device in devices:
        for line, needs in compiled(device, [word for word in options.only if word not in DEVICES]):
            lines.append(written(line, needs))
            limits = DEVICES[device]
            room = LDS if limits is None else limits[-1]
            if needs.shared > room:
                wrong.append(f"{line}: {needs.shared} bytes of shared memory, and there are {room}")
            if not options.write and lines[-1] not in before:
                wrong.append(f"the table has not: {lines[-1]}")
            print(lines[-1], flush=True)
    if options.write and not options.only:
        TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines) - 1} kernels compiled in {time.time() - began:.0f} s", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
