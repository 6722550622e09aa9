"""Audit every architecture of transformers that is built small, and write docs/audited_models.md.

.venv/bin/python tests/every_audit.py STATE                 # all that STATE, a file, does not hold yet
.venv/bin/python tests/every_audit.py STATE llama opt       # these
.venv/bin/python tests/every_audit.py STATE --write         # the table of what STATE holds

Each architecture runs in a process of its own, and each result is written to the state at once, so a run that was
stopped continues.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import time
from pathlib import Path

SECONDS = 240  # of processor time for one architecture
MEMORY = 8 << 30  # bytes for one architecture, beyond what its libraries have


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("state", type=Path)
    options.add_argument("names", nargs="*")
    options.add_argument("--write", action="store_true", help="write the table, and audit nothing")
    asked = options.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    rows = read_state(asked.state)
    if asked.write:
        from audits.table import write_page

        write_page(rows)
        return 0
    import torch
    import transformers
    from audits.architectures import find_group  # imported once, before the forks
    from audits.table import list_built
    from zoo.registry import model_class

    torch.set_num_threads(1)  # before the forks
    transformers.utils.logging.set_verbosity_error()
    model_class("bert")  # imports what all models share, once
    done = {row["name"] for row in rows if row["kind"] == find_group(row["name"]).kind}
    missing = [name for name in list_built() if name not in done]
    chosen = asked.names or sorted(missing, key=lambda name: find_group(name).kind == "given")  # known masks first
    context = multiprocessing.get_context("fork")
    for number, name in enumerate(chosen, 1):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=run_one, args=(name, sender), daemon=True)
        started = time.monotonic()
        process.start()
        sender.close()
        try:
            row = receiver.recv()
        except EOFError:  # it was stopped, by its limit or by a crash
            kind, source, _ = find_group(name)
            error = f"its process ended after {time.monotonic() - started:.0f} s"
            row = {"name": name, "kind": kind, "source": source, "error": error}
        process.join()
        with asked.state.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{number}/{len(chosen)} | {name} | {row.get('error') or summarise(row)}", flush=True)
    return 0


def read_state(path: Path) -> list[dict]:
    """The last result of each architecture."""
    lines = path.read_text().splitlines() if path.exists() else []
    return list({row["name"]: row for row in map(json.loads, lines)}.values())


def summarise(row: dict) -> str:
    return "; ".join(f"{case}: {summarise_case(found)}" for case, found in row["cases"].items())


def summarise_case(found: dict) -> str:
    if "error" in found:
        return found["error"][:80]
    codes = sorted({code for _, code, *_ in found["findings"]}) + [f"once {code}" for _, code, *_ in found["once"]]
    return ", ".join(codes) or "ok"


def run_one(name: str, sender: multiprocessing.connection.Connection) -> None:
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    from audits.architectures import audit_architecture, find_group

    try:
        sender.send(audit_architecture(name))
    except Exception as error:
        kind, source, _ = find_group(name)
        sender.send({"name": name, "kind": kind, "source": source, "error": f"{type(error).__name__}: {error}"[:200]})


if __name__ == "__main__":
    sys.exit(main())
