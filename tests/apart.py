"""Code in processes of their own, each a copy of one that has imported what they need: imports take the most time."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PARENT = """
import json, os, sys, tempfile, traceback
imports, codes = json.load(sys.stdin)
exec(imports)
for code in codes:
    out, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    child = os.fork()
    if not child:
        os.dup2(out.fileno(), 1), os.dup2(errors.fileno(), 2)
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


@dataclass
class Ended:
    status: int
    out: str
    errors: str


def run_each(imports: str, codes: list[str]) -> list[Ended]:
    """How each of some codes ended: its status (minus a signal), and what it printed."""
    command, given = [sys.executable, "-c", PARENT], json.dumps([imports, codes])
    done = subprocess.run(command, input=given, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    return [Ended(*json.loads(line)) for line in done.stdout.splitlines()]
