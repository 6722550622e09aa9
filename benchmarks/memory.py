"""Cases whose memory is measured, one to a process: python -m benchmarks.memory CASE."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import clearhead as ch
from benchmarks.explaining import recorded
from benchmarks.measure import extra_mib, status_kib
from benchmarks.watching import generating, llama


def reduce_16384() -> float:
    query, key = torch.randn(2, 1, 8, 16384, 64)
    weights = ch.weights(query, key)
    ch.weights(query[:, :, :512], key[:, :, :512]).reduce(
        ch.reductions.Entropy(), ch.reductions.TopK(5), ch.reductions.Received(), ch.reductions.Pool(128)
    )
    return extra_mib(
        lambda: weights.reduce(
            ch.reductions.Entropy(), ch.reductions.TopK(5), ch.reductions.Received(), ch.reductions.Pool(128)
        )
    )


def explain_16384() -> float:
    length, seen = 16384, recorded(16384)
    str(recorded(300).explain(0, head=3, query=290, key=77))
    return extra_mib(lambda: str(seen.explain(0, head=3, query=length - 7, key=77)))


def tiled_training_16384() -> float:
    small = [torch.randn(1, 1, 300, 64, requires_grad=True) for _ in range(3)]
    ch.attention(*small, engine="tiled").sum().backward()
    inputs = [torch.randn(1, 1, 16384, 64, requires_grad=True) for _ in range(3)]
    return extra_mib(lambda: ch.attention(*inputs, engine="tiled").sum().backward())


def additive_training_4096() -> float:
    score = ch.Additive.from_weights(None, None, torch.rand(64))
    draw = lambda n: [torch.randn(1, n, 64, requires_grad=True) for _ in range(3)]  # noqa: E731
    ch.attention(*draw(300), score=score).sum().backward()
    inputs = draw(4096)
    return extra_mib(lambda: ch.attention(*inputs, score=score).sum().backward())


def _multi_head(own: bool) -> float:
    module = torch.nn.MultiheadAttention(512, 8, dropout=0.0, batch_first=True)
    layer = ch.nn.MultiHeadAttention.from_torch(module) if own else module

    def step(length: int) -> None:
        x = torch.randn(1, length, 512, requires_grad=True)
        out = layer(x, x, x)
        (out if own else out[0]).sum().backward()

    step(64)
    return extra_mib(lambda: step(8192))


def statistics_16384() -> float:
    def step(length: int) -> None:
        q, k, v = (torch.randn(1, 8, length, 64, requires_grad=True) for _ in range(3))
        found = ch.weights(q, k).reduce(
            ch.reductions.Output(v), ch.reductions.Entropy(), ch.reductions.LogSumExp(), ch.reductions.Received()
        )
        sum(t.sum() for t in found).backward()

    step(300)
    return extra_mib(lambda: step(16384))


def _forward_mode(own: bool, train: bool) -> float:
    def math(*inputs: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(*inputs)

    def step(length: int) -> None:
        inputs = tuple(torch.randn(1, 8, length, 64, requires_grad=train) for _ in range(3))
        tangents = tuple(torch.randn(1, 8, length, 64) for _ in range(3))
        with torch.set_grad_enabled(train):
            output, tangent = torch.func.jvp(ch.attention if own else math, inputs, tangents)
            if train:  # as MeanFlow does: the tangent is a target
                (output - tangent.detach()).square().sum().backward()

    step(100)
    return extra_mib(lambda: step(2048))


def _watched(watching: Callable[[Any], Any]) -> float:
    """What is held of a model's calls when it has run."""
    model = llama()

    def run(length: int) -> Any:
        with torch.no_grad(), watching(model) as seen:
            model(torch.randint(0, 1000, (1, length)))
        return seen

    run(300)
    before, held = standing(), run(4096)
    after = standing()
    assert len(held.calls) == 4
    return (after - before) / 1024


def standing() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system
    return status_kib("VmRSS")


def watch_generation() -> float:
    model, generate = generating(2048)
    generate()
    before = standing()
    with torch.no_grad(), ch.watch(model) as seen:
        generate()
    after = standing()
    assert len(seen.calls) == 400
    return (after - before) / 1024


def watch_keep() -> float:
    return _watched(lambda model: ch.models.statistics(model, [ch.reductions.Entropy(), ch.reductions.TopK(5)]))


def watch_record() -> float:
    return _watched(ch.watch)


def _attentions(lazy: bool) -> float:
    """The peak of a forward pass, its weights asked for as lazy ones and held, or not asked for.

    Memory is taken from the system, and given back, for each tensor: holes that the allocator keeps would be counted
    too, and differ by tens of MB from run to run.
    """
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD
    model = llama()

    def run(length: int) -> None:
        ids = torch.randint(0, 1000, (1, length))
        with torch.no_grad(), ch.models.lazy_attentions(model) if lazy else nullcontext():
            output = model(ids, output_attentions=lazy)
        assert not lazy or len(output.attentions) == 4

    run(64)
    return extra_mib(lambda: run(3072))


def _audit(level: Any) -> float:
    """The peak of an audit, or of a forward pass. Memory is taken from the system for each tensor, as above."""
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD
    model = llama()

    def run(length: int) -> None:
        batch = {"input_ids": torch.randint(3, 1000, (1, length)), "use_cache": False}
        if level is None:
            with torch.no_grad():
                model(**batch)
        else:
            assert ch.audit(model, batch, ch.Causal(), level=level).ok

    run(64)
    return extra_mib(lambda: run(4096))


CASES = {
    case.__name__: case
    for case in (
        reduce_16384,
        explain_16384,
        tiled_training_16384,
        additive_training_4096,
        statistics_16384,
        watch_generation,
        watch_keep,
        watch_record,
    )
}
for train, name in ((False, "jvp_2048"), (True, "jvp_training_2048")):
    CASES |= {name: partial(_forward_mode, True, train), f"sdpa_{name}": partial(_forward_mode, False, train)}
CASES |= {"multi_head_8192": partial(_multi_head, own=True), "torch_multi_head_8192": partial(_multi_head, own=False)}
CASES |= {"lazy_attentions": partial(_attentions, lazy=True), "no_attentions": partial(_attentions, lazy=False)}
CASES |= {"no_audit": partial(_audit, None)}
CASES |= {f"audit_{level}": partial(_audit, level) for level in ("outputs", "layers", "all")}

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(2)
    print(CASES[sys.argv[1]]())
