"""Processes that are the ranks of a group, on this machine.

A test calls `on_ranks(2, "ranks.cases:everything", 3)`: each process calls that function with its rank, and what it
returns is written as JSON. They are forks of one process that has imported what they need.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
MODELS = ("llama", "mistral", "gemma2", "gpt_oss", "gpt2", "bert", "modernbert")  # imported once, and not by each rank
FORKS.set_forkserver_preload(
    ["torch", "clearhead.testing", "clearhead.models", *(f"transformers.models.{m}.modeling_{m}" for m in MODELS)]
)


def on_ranks(ranks: int, function: str, *given: Any, patience: float = 120, may_end: tuple[int, ...] = ()) -> list[Any]:
    """What the function returns on each rank. A process that is slower than `patience` seconds is a failure.

    `may_end`: ranks that are to end without an answer, for which it is None.
    """
    with tempfile.TemporaryDirectory() as folder:
        every = [FORKS.Process(target=_rank, args=(rank, ranks, folder, function, given)) for rank in range(ranks)]
        end = time.monotonic() + patience
        try:
            for process in every:
                process.start()
            for process in every:
                process.join(max(0.1, end - time.monotonic()))
                assert process.exitcode is not None, f"a rank hangs:\n{_said(folder, ranks)}"
        finally:
            for process in every:
                process.kill()
                process.join()
        answers = []
        for rank, process in enumerate(every):
            answer = Path(folder) / f"answer-{rank}"
            there = answer.exists()
            assert there or rank in may_end, f"rank {rank} ended with {process.exitcode}:\n{_said(folder, ranks)}"
            answers.append(json.loads(answer.read_text()) if there else None)
        return answers


def _said(folder: str, ranks: int) -> str:
    return "\n".join(f"--- rank {rank}\n{(Path(folder) / f'said-{rank}').read_text()[-3000:]}" for rank in range(ranks))


def _rank(rank: int, ranks: int, folder: str, function: str, given: tuple[Any, ...]) -> None:
    """One of the processes."""
    said = os.open(Path(folder) / f"said-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    import torch
    import torch.distributed as dist

    try:
        torch.set_num_threads(1)
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store, timeout=timedelta(seconds=20))
        module, _, name = function.partition(":")
        answer = getattr(importlib.import_module(module), name)(rank, *given)
        (Path(folder) / f"answer-{rank}").write_text(json.dumps(answer))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # a group with a member that has ended cannot be closed
