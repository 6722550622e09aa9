"""What every test and every document's examples find: PyTorch's compiler as in a fresh process; and cheap memory."""

import ctypes
import gc
import importlib.util
import sys

import pytest

# Triton is there for Linux alone, and has no examples
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["src/clearhead/engines/triton/*"]

# A worker makes many short-lived objects: to look through them at each 700 took up to a tenth of some files' time.
GARBAGE = 50_000, 10, 10

KEPT = {-3: 2**28, -1: 2**29}  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of mallopt(3), in bytes


def pytest_configure(config):
    """Memory that is freed stays with the process: to fetch its pages anew took a third of the larger tests' time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    for option, size in KEPT.items() if mallopt else ():
        mallopt(option, size)
    gc.disable()  # while tests are collected: nearly all that is imported stays


def pytest_collection_finish(session):
    """What has been imported stays: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE)
    gc.enable()


@pytest.fixture(scope="module")
def few_to_collect():
    """For files whose tests call the garbage collector each: it does not look through what other files have left."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown():
    """No test leaves compiled code, which would run in the next one too; nor figures, of which more than 20 warn."""
    result = yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
    return result
