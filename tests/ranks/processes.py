"""Processes that are the ranks of a group, on this machine.

A test calls `on_ranks(2, "ranks.cases:everything", 3)`; this file, run as a program, is one rank: it calls the function
with its rank, and writes what that returns as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]


def on_ranks(ranks: int, function: str, *given: Any, patience: float = 120, may_end: tuple[int, ...] = ()) -> list[Any]:
    """What the function returns on each rank. A process that is slower than `patience` seconds is a failure.

    `may_end`: ranks that are to end without an answer, for which it is None.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
        processes = []
        for rank in range(ranks):
            command = [sys.executable, "-W", "error::FutureWarning", __file__, str(rank), str(ranks), folder, function]
            with (Path(folder) / f"said-{rank}").open("w") as said:
                processes.append(
                    subprocess.Popen([*command, json.dumps(given)], env=environment, stdout=said, stderr=said)
                )
        end = time.monotonic() + patience
        try:
            for process in processes:
                process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"a rank hangs:\n{_said(folder, ranks)}") from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
        answers = []
        for rank, process in enumerate(processes):
            answer = Path(folder) / f"answer-{rank}"
            assert answer.exists() or rank in may_end, (
                f"rank {rank} ended with {process.returncode}:\n{_said(folder, ranks)}"
            )
            answers.append(json.loads(answer.read_text()) if answer.exists() else None)
        return answers


def _said(folder: str, ranks: int) -> str:
    return "\n".join(f"--- rank {rank}\n{(Path(folder) / f'said-{rank}').read_text()[-3000:]}" for rank in range(ranks))


def main() -> None:
    rank, ranks, folder, function = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store, timeout=timedelta(seconds=20))
    module, _, name = function.partition(":")
    answer = getattr(importlib.import_module(module), name)(rank, *json.loads(sys.argv[5]))
    (folder / f"answer-{rank}").write_text(json.dumps(answer))
    os._exit(0)  # a group with a member that has ended cannot be closed


if __name__ == "__main__":
    main()
