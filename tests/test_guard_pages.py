"""No kernel reads or writes outside of the buffers it is given, on any instruction set."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from apart import run_each
from instruction_sets import AVAILABLE, SETS

CHILD = Path(__file__).with_name("guard_pages.py")


@pytest.mark.parametrize("instructions", [pytest.param(AVAILABLE[0], id="some"), *SETS])
def test_kernels_stay_inside_their_buffers(instructions, request):
    """A fault ends a process of its own, whose last line is the case."""
    folder = request.config.getoption("--kernels")
    every = "7" if request.node.callspec.id == "some" else "1"
    command = [sys.executable, CHILD, instructions, every, *([folder] if folder else [])]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # many short calls: threads would only wait for each other
    done = subprocess.run(command, capture_output=True, text=True, env=one_thread)
    lines = done.stdout.splitlines() or ["none was begun"]
    different = [line for line in lines if line.startswith("DIFFERENT")]
    assert not different, "\n".join(different)
    assert done.returncode == 0, f"ended with {done.returncode} at: {lines[-1]}\n{done.stderr[-2000:]}"


OUTSIDE = """
tensor = guarded_memory.Guard("{side}").copy(torch.ones(3, 7))
inside = ctypes.c_float.from_address(tensor.data_ptr() + (80 if "{side}" == "after" else 0))
assert inside.value == 1.0
outside = ctypes.c_float.from_address(tensor.data_ptr() + (84 if "{side}" == "after" else -4))
print("before", flush=True)
{access}
print("after")
"""
ONE_ROW_TOO_MANY = """
class Shifted:
    "A tensor said to have other rows than it has."
    def __init__(self, tensor, rows, by):
        self.tensor, self.shape, self.by = tensor, (1, 1, rows, 8), by
        self.dtype, self.is_cpu = tensor.dtype, True
    def data_ptr(self):
        return self.tensor.data_ptr() + 4 * self.by
    def stride(self):
        return self.tensor.stride()

with guarded_memory.guarding("{side}", bindings):
    x = torch.ones(1, 1, 6, 8)
    problem = bindings.kernels().Problem
    options = *[None] * 11, 0.0, 0, 0
    read = lambda query: problem(0, 1.0, 0.0, 1, query, x, x, *options)
    call = lambda query, out: bindings.chosen().forward(read(query), False, out, None, None)
    call(x, bindings.torch.zeros(1, 1, 6, 8))
    print("before", flush=True)
    after = "{side}" == "after"
    call(Shifted(x, 600 if after else 6, 0 if after else -1), bindings.torch.zeros(1, 1, 600, 8))
    print("after")
"""
SIDES = ("after", "before")


def test_a_step_outside_ends_the_process():
    """One of ctypes; and one of a kernel, whose pointers lead to guarded memory: one more query, or one before the
    first.
    """
    codes = [OUTSIDE.format(side=side, access=a) for side in SIDES for a in ("outside.value", "outside.value = 1.0")]
    codes += [ONE_ROW_TOO_MANY.format(side=side) for side in SIDES]
    imports = "import ctypes, torch, guarded_memory; from clearhead.engines.native import bindings"
    for code, ended in zip(codes, run_each(imports, codes), strict=True):
        assert ended.status != 0 and ended.out == "before\n", f"{code}{ended}"
