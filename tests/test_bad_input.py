"""Every public entry with every kind of unusual argument: a right answer or a `ClearheadError`, and nothing else.

The cases are a table (`bad_input/entries.py`) times a list of values (`bad_input/values.py`), and inputs in which a
size is 0 (`bad_input/empties.py`). They run in processes of their own: one that ends its process is named, and the next
one goes on after it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bad_input.entries import ENTRIES, NOT_CALLED, public

GROUPS = [*sorted({entry.group for entry in ENTRIES.values()}), "empties"]


@pytest.mark.parametrize("every", [1, 160])
def test_a_right_answer_or_one_clear_error(every):
    wrong, seen = [], []
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bad_input.run", str(every), *GROUPS]
    while True:
        done = subprocess.run(command, input=json.dumps(seen), capture_output=True, text=True, env=environment)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        wrong += [text for kind, text in lines if kind == "wrong"]
        begun = [text for kind, text in lines if kind == "at"]
        if lines and lines[-1][0] == "done":
            break
        assert begun, f"nothing could be run: {done.stderr[-1000:]}"
        wrong.append(f"{begun[-1]} ends its process ({done.returncode})")
        seen += begun
    assert not wrong, f"{len(wrong)} cases:\n" + "\n".join(wrong)


def test_every_public_name_is_in_the_table():
    missing = {name for name in public() if name not in ENTRIES and name not in NOT_CALLED}
    assert not missing


def test_the_table_has_no_more_than_there_is():
    known = set(public()) | {f"nn.KeyValueCache.{name}" for name in ("append", "of", "reorder", "crop", "reset")}
    known |= {"PartialAttention.merge", "PartialAttention.finish", "PartialAttention.transpose"}
    known |= {"nn.MultiHeadAttention.prepare", "nn.AdditiveAttention.prepare"}
    known |= {f"nn.RotaryScaling.{name}" for name in ("linear", "dynamic", "llama3")}
    named = {name.rstrip("()") for name in ENTRIES if " " not in name and "[" not in name}
    assert named - known <= {"mask.dense"}
    assert set(NOT_CALLED) <= known
