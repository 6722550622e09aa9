"""The kernels in Triton, interpreted: each part in a process of its own, since the interpreter is chosen at import."""

import os
import subprocess
import sys
from pathlib import Path

import fuzz
import fuzz_triton
import pytest

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is there for Linux alone")


def interpreted(*arguments):
    """The tests of tests/interpreted that these arguments select, in the strict interpreter."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=HERE.parent)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_planted_faults():
    interpreted("tests/interpreted/faults.py")


def test_a_sample_of_the_kernels():
    """With the planted faults: one process imports less than two."""
    interpreted("tests/interpreted/compared.py", "tests/interpreted/faults.py", "-m", "not explore")


def test_all_of_the_kernels():
    interpreted("tests/interpreted/compared.py")


@pytest.mark.parametrize(("first", "stop"), [(0, 4), (4, 100)])
def test_no_random_problem_is_beyond_its_budget(first, stop, monkeypatch):
    """`python tests/fuzz_triton.py 2000` runs more."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    failures = fuzz.fuzz(first, stop, program=fuzz_triton.__file__)
    assert not failures, "\n".join(failures)
