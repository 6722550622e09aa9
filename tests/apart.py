"""Code in processes of their own, each a copy of one that has imported what they need: imports take the most time."""

from __future__ import annotations

import atexit
import functools
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PARENT = """
import json, os, sys, tempfile, traceback
exec(json.loads(sys.stdin.readline()))
for code in map(json.loads, sys.stdin):
    out, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(out.fileno(), 1), os.dup2(errors.fileno(), 2)
        status = 0
        try:
            exec(code)
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        os._exit(status)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    texts = [file.seek(0) or file.read().decode() for file in (out, errors)]
    print(json.dumps([ended, *texts]), flush=True)
"""
PYTORCH = "import torch"  # most need no more


@dataclass
class Ended:
    status: int
    out: str
    errors: str


@functools.cache
def parent(imports: str) -> subprocess.Popen[str]:
    """One for all tests of this process that need these imports. It ends when its input does."""
    command, here = [sys.executable, "-c", PARENT], Path(__file__).parent
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=here)
    atexit.register(started.communicate)
    send(started, imports)
    return started


def send(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(text) + "\n")
    process.stdin.flush()


def run_each(imports: str, codes: list[str]) -> list[Ended]:
    """How each of some codes ended: its status (minus a signal), and what it printed."""
    process, ended = parent(imports), []
    assert process.stdout is not None
    for code in codes:
        send(process, code)
        line = process.stdout.readline()
        assert line, f"the process that has run {imports!r} has ended"
        ended.append(Ended(*json.loads(line)))
    return ended


def run(code: str, strict: bool = False) -> Ended:
    """How one code ended in a process that has imported PyTorch alone. `strict`: a warning is an error, as by -W."""
    return run_each(PYTORCH, [f"import warnings; warnings.simplefilter('error')\n{code}" if strict else code])[0]
