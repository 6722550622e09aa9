"""One sequence of 16,384 tokens in two processes of one thread each, beside one process of two threads.

Both stand in one run: the first process computes the whole sequence too, in turn, while the second waits for it.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import clearhead as ch
from benchmarks.result import Result, agree, times

LENGTH, HEADS, WIDTH = 16384, 4, 64
ROUNDS = 5
RANKS = 2
WALL = "one process", "two"
# what a core works: where one is slower for a while, two processes wait for it, and threads share out what is left
PROCESSOR = "a thread of one process, processor time", "the longer of two"


def _documents() -> ch.extend.Mask:
    return ch.Documents.from_lengths([LENGTH // 8] * 8)


MASKS: dict[str, tuple[Callable[[], ch.extend.Mask], str, float]] = {
    "causal": (ch.Causal, "ZigZag", 1.0),
    "window": (lambda: ch.SlidingWindow(before=1023), "Contiguous", 0.9),
    "documents": (_documents, "Contiguous", 0.9),
}


class Held(TorchDispatchMode):
    """The most bytes that tensors held at once: those given, and those that operations made and are still there."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0
        self.note(given)

    def note(self, tensors: Any) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {at: held for at, held in self.live.items() if not held[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.live.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.note(t for t in (found if isinstance(found, tuple | list) else [found]) if isinstance(t, Tensor))
        return found


def _both(attend: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    output = attend(*inputs)
    return output.detach(), *torch.autograd.grad(output, inputs, grad)


def rank(number: int, name: str, folder: str) -> None:
    """One of the two processes."""
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", rank=number, world_size=RANKS, store=store)
    make, layout_name, _ = MASKS[name]
    mask, layout = make(), getattr(ch.distributed, layout_name)(LENGTH)
    torch.manual_seed(0)
    query, key, value, grad = torch.randn(4, 1, HEADS, LENGTH, WIDTH)
    whole = [t.requires_grad_() for t in (query, key, value)]
    own = [layout.shard(t.detach(), 2).requires_grad_() for t in whole]
    own_grad = layout.shard(grad, 2)

    def alone() -> tuple[Tensor, ...]:
        return _both(lambda *t: ch.attention(*t, mask=mask), grad, *whole)

    def together() -> tuple[Tensor, ...]:
        return _both(lambda *t: ch.distributed.attention(*t, layout=layout, mask=mask), own_grad, *own)

    torch.set_num_threads(2 if number == 0 else 1)
    expected = [layout.shard(t, 2) for t in alone()]
    torch.set_num_threads(1)
    for mine, true in zip(together(), expected, strict=True):
        agree(mine, true)
    del expected
    seconds: dict[str, list[float]] = {each: [] for each in (*WALL, *PROCESSOR)}
    for _ in range(ROUNDS):
        dist.barrier()
        if number == 0:
            torch.set_num_threads(2)
            began, worked = time.perf_counter(), time.process_time()
            alone()
            seconds[WALL[0]].append(time.perf_counter() - began)
            seconds[PROCESSOR[0]].append((time.process_time() - worked) / 2)
            torch.set_num_threads(1)
        dist.barrier()
        began, worked = time.perf_counter(), time.process_time()
        together()
        seconds[PROCESSOR[1]].append(time.process_time() - worked)
        dist.barrier()
        seconds[WALL[1]].append(time.perf_counter() - began)
    with Held(*whole, grad) as one:
        alone()
    with Held(*own, own_grad) as two:
        together()
    said = {"seconds": {who: statistics.median(all_of or [0.0]) for who, all_of in seconds.items()}}
    (Path(folder) / f"{number}.json").write_text(json.dumps(said | {"held": [one.most, two.most]}))
    dist.destroy_process_group()


def _measured(name: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(rank, args=(name, folder), nprocs=RANKS)
        return [json.loads((Path(folder) / f"{number}.json").read_text()) for number in range(RANKS)]


def time_of(name: str) -> Callable[[], Result]:
    def run() -> Result:
        first, second = (each["seconds"] for each in _measured(name))
        seconds = first | {PROCESSOR[1]: max(first[PROCESSOR[1]], second[PROCESSOR[1]])}
        _, layout, bar = MASKS[name]
        ratio = seconds[WALL[1]] / seconds[WALL[0]]
        what = f"{name}, {layout}, forward + backward at (1,{HEADS},{LENGTH},{WIDTH}): 2 ranks × 1 thread over 1 × 2"
        return Result(what, ratio, "×", f"≤ {bar}", ratio <= bar, times(seconds))

    return run


def held() -> Result:
    one, two = zip(*(each["held"] for each in _measured("causal")), strict=True)
    ratio = max(two) / max(one)
    what = (
        f"the same, causal: the most bytes of tensors that a rank holds, over one process ({max(one) / 2**20:.0f} MiB)"
    )
    return Result(what, ratio, "×", "≤ 0.6", ratio <= 0.6, {})


CASES: dict[str, Callable[[], Result]] = {
    "ranks-causal": time_of("causal"),
    "ranks-window": time_of("window"),
    "ranks-documents": time_of("documents"),
    "ranks-memory": held,
}
