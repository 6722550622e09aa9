"""Calls on CUDA make the host wait for nothing between the call and the launch: counted on a device without a GPU.

The device, `fake_cuda/device.cpp`, is made of the host's memory, and needs a process in which PyTorch is not there yet.
FlexAttention runs there as the operator in plain PyTorch that it is, and not as the kernel that it is compiled to.
"""

import functools
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torchgen
import yaml

HERE = Path(__file__).parent / "fake_cuda"
OPERATIONS = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
sys.path.append(str(HERE))
import device  # noqa: E402
from bad_input.entries import NOT_CALLED, public  # noqa: E402
from entries import APART, CASES, case_of  # noqa: E402

TABLE = (Path(__file__).parents[1] / "docs" / "guides" / "devices.md").read_text(encoding="utf-8").splitlines()
ENTRIES = sorted({*public()} - {*NOT_CALLED} - {*APART} | {*CASES})

LENGTHS = "a wrong length is an error in words: one look when the mask is built, here in each call"
CHECKED = "what is wrong in it is an error in words: one look when the mask is built, here in each call"
EDITS = "which heads and positions it changes are lists of numbers, which are copied to the device"
BLOCKS = "its blocks follow the mask: one copy of starts and stops"
# How often a call waits, and why. All others never do.
WAITS = {
    "sdpa, padding": (1, BLOCKS),
    "tiled, padding": (1, BLOCKS),
    "Additive, padding": (1, BLOCKS),
    "reduce, padding": (1, BLOCKS),
    "MultiHeadAttention, valid_lens": (1, LENGTHS),
    "AdditiveAttention": (1, LENGTHS),
    "Lengths, built in the call": (1, LENGTHS),
    "Padding of integers, built in the call": (1, CHECKED),
    "Documents, built in the call": (1, CHECKED),
    **dict.fromkeys(("edits.AddBias", "edits.Ablate", "edits.MapWeights", "edits.ScaleHeads"), (1, EDITS)),
    "edits.Freeze": (2, f"{EDITS}; {BLOCKS}"),
    "edits.Patch": (3, f"{EDITS}; so are those of the source, and the rows where its output is put"),
    "edits.ForceMask": (2, f"{EDITS}; {BLOCKS}"),
    "edits.Knockout": (2, f"{EDITS}; {BLOCKS}"),
    "reductions.Mass": (1, "a group below 0 is an error in words, and the largest says how many there are"),
}


@functools.cache
def printed(*arguments):
    """What each case has printed: one process for all of them, because they share what they compile."""
    command = [sys.executable, "-W", "ignore", str(HERE / "calls.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert not done.returncode, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line.pop("case"): line for line in lines}


@pytest.fixture(scope="module")
def found():
    why = device.why_not()
    if why is not None:
        pytest.skip(why)
    return dict(printed())


def test_the_host_waits_only_where_it_is_said(found):
    found = {name: case for name, case in found.items() if name not in ("without float64", "unseen")}
    plans = found.pop("plans")
    assert plans["shapes alone"] == {row: plans["engines"][row] for row in plans["shapes alone"]}
    assert ["triton"] in plans["shapes alone"].values()
    for row, engines in plans["engines"].items():
        lines = [line.split("|") for line in TABLE if line.startswith(f"| {row}")]
        assert len(lines) == 1, f"docs/guides/devices.md has {len(lines)} rows that begin with {row!r}"
        assert engines == [lines[0][2].split("`")[1]], row
    waits = {name: case["reads"] + case["downloads"] + case["uploads"] for name, case in found.items()}
    expected = dict.fromkeys(found, 0) | {name: count for name, (count, _) in WAITS.items()}
    assert waits == expected, [found[name]["places"] for name in found if waits[name] != expected[name]]
    missing = {name: case_of(name) for name in ENTRIES if case_of(name) not in found}
    assert not missing, "no case counts these entries: add one to fake_cuda/looks.py"
    assert len(found) > 90


def test_every_public_entry_is_counted_or_says_why_not():
    assert not set(APART) & set(CASES)
    assert set(APART) | set(CASES) <= set(public()), "the tables have more than there is"


def test_the_engines_for_any_device_need_no_float64(found):
    """Apple's devices have none: on a device that refuses it, each case runs, with tensors of these dtypes alone."""
    tried = found["without float64"]
    assert tried["tried"] > 50 and not tried["failed"], tried["failed"]
    assert set(tried["dtypes"]) <= {"Bool", "Byte", "Char", "Int", "Long", "Float"}


def test_each_operation_of_the_engines_for_any_device_has_a_kernel_for_mps(found):
    """PyTorch's own table says which operations have one: of their own, or made of other operations."""
    table = {entry["func"].split("(")[0]: entry for entry in yaml.safe_load(OPERATIONS.read_text(encoding="utf-8"))}

    def on_mps(name):
        entry = table[name]
        if "structured_delegate" in entry:
            return on_mps(entry["structured_delegate"])
        keys = [key.strip() for several in entry.get("dispatch", ["Composite"]) for key in several.split(",")]
        return any(key == "MPS" or key.startswith("Composite") for key in keys)

    names = [name.removeprefix("aten::") for name in found["without float64"]["operations"]]
    assert len(names) > 50
    assert [name for name in names if not on_mps(name)] == []
    assert not on_mps("linalg_eig")  # the table says so of some


def test_the_device_sees_what_would_wait(found):
    assert found["unseen"] == {"looks": [], "too many": False}


KERNELS = {  # the kernels of a case: forward, and backward where it is trained
    "window": 2,
    "gaps, a residual": 1,
    "rules that read tensors": 2,
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
    *calls, _, _ = of_triton
    assert [call["case"] for call in calls if call["waits"]] == []
    assert len(calls) >= 9 and all(call["kernels"] for call in calls)


def test_a_call_of_triton_is_few_operations_beside_its_kernels(of_triton):
    """One, zeros, in the second call with a mask: a kernel finds what is not finite."""
    found = {call["case"]: call for call in of_triton if "kernels" in call}
    for name in ("decoding", "a mask on the device", "additive, a mask on the device"):
        assert found[name]["operations"] <= 1, found[name]
    assert found["a mask on the device"]["kernels"] == ["poison_kernel", "forward_kernel"]


def test_tensors_without_values_give_shapes_and_start_no_kernel(of_triton):
    assert of_triton[-2] == {"engine": "triton", "same": True}


def test_while_a_graph_is_captured_nothing_is_proved_compiled_or_kept(of_triton):
    found = of_triton[-1]
    assert found["engine"] == "tiled" and "not triton    it was not proved on this device yet" in found["why"]
    assert "was not compiled yet" in found["said"] and "once before the capture" in found["said"]
    outside, inside = found["kept"]
    assert outside > inside == 0
