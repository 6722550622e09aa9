"""Calls on CUDA make the host wait for nothing between the call and the launch: counted on a device without a GPU.

The device, `fake_cuda/device.cpp`, is made of the host's memory, and needs a process in which PyTorch is not there yet.
FlexAttention runs there as the operator in plain PyTorch that it is, and not as the kernel that it is compiled to.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "fake_cuda"
sys.path.append(str(HERE))
import device  # noqa: E402

LENGTHS = "a wrong length is an error in words: two looks when the mask is built, here in each call"
CHECKED = "what is wrong in it is an error in words: one look when the mask is built, here in each call"
BLOCKS = "its blocks follow the mask: one copy of starts and stops"
# How often a call waits, and why. All others never do.
WAITS = {
    "sdpa, padding": (1, BLOCKS),
    "tiled, padding": (1, BLOCKS),
    "Additive, padding": (1, BLOCKS),
    "reduce, padding": (1, BLOCKS),
    "MultiHeadAttention, valid_lens": (2, LENGTHS),
    "AdditiveAttention": (2, LENGTHS),
    "Lengths, built in the call": (2, LENGTHS),
    "Padding of integers, built in the call": (1, CHECKED),
    "Documents, built in the call": (1, CHECKED),
}


@pytest.fixture(scope="module")
def found():
    """What each case has printed."""
    why = device.why_not()
    if why is not None:
        pytest.skip(why)
    command = [sys.executable, "-W", "ignore", str(HERE / "calls.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert not done.returncode, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line.pop("case"): line for line in lines}


def test_the_host_waits_only_where_it_is_said(found):
    plans = found.pop("plans")["engines"]
    assert plans == {
        **dict.fromkeys(("attention", "causal"), "sdpa"),
        **dict.fromkeys(("window", "padding", "learnt bias", "sinks", "softcap"), "flex"),
        "dropout": "tiled",
        "attention, shapes alone": "sdpa",
        **dict.fromkeys(("window, shapes alone", "softcap, shapes alone"), "flex"),
        "dropout, shapes alone": "tiled",
    }
    waits = {name: case["reads"] + case["downloads"] + case["uploads"] for name, case in found.items()}
    expected = dict.fromkeys(found, 0) | {name: count for name, (count, _) in WAITS.items()}
    assert waits == expected, [found[name]["places"] for name in found if waits[name] != expected[name]]
    assert len(found) > 60


def test_the_engines_for_any_device_need_no_float64():
    """Apple's devices have none. What else they lack, this device cannot tell."""
    why = device.why_not()
    if why is not None:
        pytest.skip(why)
    command = [sys.executable, "-W", "ignore", str(HERE / "calls.py"), "--without-float64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tried"] > 50 and not found["failed"], found["failed"]


KERNELS = {  # the kernels of a case: forward, and backward where it is trained
    "window": 2,
    "gaps, a residual": 1,
    "a bias by distance, learnt": 2,
    "a bias of every pair": 2,
    "softcap, sinks, 128 wide": 2,
    "float32": 2,
    "narrow": 1,
    "lengths left open": 2,
    "decoding, three heads to a key head": 1,
}
H100 = 232448  # bytes of shared memory that a block of threads may have


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_of_flex_compile_for_a_gpu_that_is_not_here(name):
    """PyTorch writes them, Triton compiles them; none of them runs."""
    why = device.why_not()
    if why is None and importlib.util.find_spec("triton") is None:
        why = "Triton is not installed"
    if why is not None:
        pytest.skip(why)
    command = [sys.executable, "-W", "ignore", str(HERE / "lowering.py"), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert not done.returncode, done.stderr[-3000:]
    kernels = json.loads(done.stdout.splitlines()[-1])["kernels"]
    assert len(kernels) == KERNELS[name]
    assert all(0 < kernel["shared"] <= H100 for kernel in kernels), kernels


@pytest.fixture(scope="module")
def of_triton():
    """What calls of the engine `triton` print, whose kernels are not started."""
    why = device.why_not()
    if why is None and importlib.util.find_spec("triton") is None:
        why = "Triton is not installed"
    if why is not None:
        pytest.skip(why)
    command = [sys.executable, "-W", "ignore", str(HERE / "triton_calls.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert not done.returncode, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_calls_of_triton_wait_for_nothing_up_to_their_kernels(of_triton):
    *calls, _ = of_triton
    assert [call["case"] for call in calls if call["waits"]] == []
    assert len(calls) >= 7 and all(call["kernels"] for call in calls)


def test_while_a_graph_is_captured_nothing_is_proved_compiled_or_kept(of_triton):
    found = of_triton[-1]
    assert found["engine"] == "tiled" and "not triton    it was not proved on this device yet" in found["why"]
    assert "was not compiled yet" in found["said"] and "once before the capture" in found["said"]
    outside, inside = found["kept"]
    assert outside > inside == 0


def test_the_device_sees_what_would_wait():
    why = device.why_not()
    if why is not None:
        pytest.skip(why)
    code = """
import device; here = device.there()
import torch
x, before = torch.arange(6.0, device="cuda"), here.counts()
looks = (
    lambda: x.sum().item(), lambda: bool(x[0]), lambda: x[1].tolist(), lambda: x[x > 2], lambda: x.nonzero(),
    lambda: x.cpu(), lambda: x.tolist(), lambda: torch.tensor([1.0], device="cuda"), lambda: torch.equal(x, x),
    lambda: x.masked_select(x > 1), lambda: x.unique(), lambda: torch.repeat_interleave(x, x.long()),
)
for look in looks:
    before = here.counts()
    look()
    assert here.counts()[:3] != before[:3], look.__code__.co_firstlineno
before = here.counts()
((x * 2).softmax(0) @ x).add_(torch.zeros(1).to("cuda", non_blocking=True)[0])
assert here.counts()[:3] == before[:3], here.counts()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=HERE, check=True, timeout=600)
