"""What is measured: each case gives a figure, and the bar it should reach."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
from benchmarks import (
    audits,
    browsing,
    calls,
    decoding,
    editing,
    end_to_end,
    explaining,
    functions,
    low_precision,
    masks,
    pages,
    sharding,
    surveying,
    training,
    watching,
)
from benchmarks.measure import interleaved, peak_mib
from benchmarks.result import Result, agree, faster, leaves, times

sdpa = F.scaled_dot_product_attention


def small(bar: float, causal: bool) -> Result:
    """What `attention()` adds to SDPA's own call."""
    q, mask = torch.randn(1, 8, 16, 64), ch.Causal() if causal else None
    calls = {"sdpa": lambda: sdpa(q, q, q, is_causal=causal), "clearhead": lambda: ch.attention(q, q, q, mask=mask)}
    agree(*(call() for call in reversed(calls.values())))
    torch.set_num_threads(1)
    seconds = interleaved(calls, 4000, 200)
    torch.set_num_threads(2)
    over = seconds["clearhead"] / seconds["sdpa"] - 1
    what = f"attention({'Causal()' if causal else ''}) at (1,8,16,64), 1 thread: what it adds to SDPA's call"
    return Result(what, over, "×", f"≤ {bar}", over <= bar, times(seconds))


def both_ways(attend: Callable[[], Tensor], inputs: list[Tensor], grad: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """A forward pass and its backward pass, as one call that gives the inputs' gradients."""

    def run() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(attend(), inputs, grad)

    return run


def small_backward(bar: float, causal: bool) -> Result:
    """Forward and backward, over SDPA's."""
    q, k, v = torch.randn(3, 1, 8, 16, 64)
    mask, grad = ch.Causal() if causal else None, torch.randn(1, 8, 16, 64)
    leaves = [t.requires_grad_() for t in (q, k, v)]

    calls = {
        "sdpa": both_ways(lambda: sdpa(q, k, v, is_causal=causal), leaves, grad),
        "clearhead": both_ways(lambda: ch.attention(q, k, v, mask=mask), leaves, grad),
    }
    agree(calls["clearhead"]()[0], calls["sdpa"]()[0])
    torch.set_num_threads(1)
    seconds = interleaved(calls, 2000, 200)
    torch.set_num_threads(2)
    ratio = seconds["clearhead"] / seconds["sdpa"]
    what = f"attention({'Causal()' if causal else ''}) at (1,8,16,64), 1 thread, forward + backward, over SDPA"
    return Result(what, ratio, "×", f"≤ {bar}", ratio <= bar, times(seconds))


def importing() -> Result:
    # as for an installed package: with bytecode, which the first runs write
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def run(code: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", code], check=True, env=surroundings)

    seconds = interleaved({"torch": run("import torch"), "clearhead": run("import torch, clearhead")}, 15, 2)
    over = seconds["clearhead"] - seconds["torch"]
    what = "import clearhead, over import torch"
    return Result(what, over, "s", "≤ 0.15", over <= 0.15, times(seconds))


def overhead_512() -> Result:
    q = torch.randn(1, 8, 512, 64)
    seconds = interleaved({"sdpa": lambda: sdpa(q, q, q), "clearhead": lambda: ch.attention(q, q, q)}, 300, 10)
    ratio = seconds["clearhead"] / seconds["sdpa"]
    return Result("attention() over SDPA at (1,8,512,64)", ratio, "×", "≤ 1.05", ratio <= 1.05, times(seconds))


def window() -> Result:
    q, k, v = torch.randn(3, 1, 8, 8192, 64)
    mask = ch.SlidingWindow(before=255)
    keep = mask.dense(q, k)
    calls = {
        "sdpa, bool mask": lambda: sdpa(q, k, v, attn_mask=keep),
        "clearhead": lambda: ch.attention(q, k, v, mask=mask),
    }
    return faster("window of 256 at (1,8,8192,64), over SDPA with a bool mask", 25, calls, 7)


def padded() -> Result:
    size = 2048
    q, k, v = torch.randn(3, 4, 8, size, 64)
    mask = ch.Lengths([size, size // 4, size // 2, size // 8])
    keep = mask.dense(q, k)
    calls = {
        "sdpa, bool mask": lambda: sdpa(q, k, v, attn_mask=keep),
        "sdpa, no mask": lambda: sdpa(q, k, v),
        "clearhead": lambda: ch.attention(q, k, v, mask=mask),
    }
    agree(calls["clearhead"](), calls["sdpa, bool mask"]())
    seconds = interleaved(calls, 9, 1)
    ratio = seconds["sdpa, no mask"] / seconds["clearhead"]  # the harder comparison: SDPA that ignores the padding
    what = "lengths [S, S/4, S/2, S/8] at (4,8,2048,64), over SDPA without a mask"
    return Result(what, ratio, "× faster", "≥ 1.8", ratio >= 1.8, times(seconds))


def grouped_decode() -> Result:
    q, k, v = torch.randn(1, 32, 1, 128), torch.randn(1, 8, 8192, 128), torch.randn(1, 8, 8192, 128)
    calls = {"sdpa, enable_gqa": lambda: sdpa(q, k, v, enable_gqa=True), "clearhead": lambda: ch.attention(q, k, v)}
    return faster("decoding, 32 heads over 8, 8192 keys, D 128, over enable_gqa", 2.1, calls, 60)


def inspection(size: int, rounds: int) -> Result:
    q, k, v = torch.randn(3, 1, 8, size, 64)
    lazy = ch.weights(q, k)
    calls = {
        "sdpa forward": lambda: sdpa(q, k, v),
        "reduce": lambda: lazy.reduce(
            ch.reductions.Output(v),
            ch.reductions.Entropy(),
            ch.reductions.TopK(5),
            ch.reductions.Received(),
            ch.reductions.Pool(128),
        ),
    }
    agree(calls["reduce"]()[0], calls["sdpa forward"]())
    seconds = interleaved(calls, rounds, 1)
    ratio = seconds["reduce"] / seconds["sdpa forward"]
    bar = {1024: 1.2, 4096: 1.05, 16384: 1.0}[size]
    what = f"output, entropy, top-5, received, 128² map at (1,8,{size},64), over one SDPA forward"
    return Result(what, ratio, "×", f"≤ {bar}", ratio <= bar, times(seconds))


def reduce_memory() -> Result:
    extra = peak_mib("reduce_16384")
    return Result("the same at 16384: extra memory", extra, "MiB", "≤ 100", extra <= 100, {})


def training_memory() -> Result:
    extra = peak_mib("tiled_training_16384")
    what = "tiled, forward + backward at (1,1,16384,64): extra memory"
    return Result(what, extra, "MiB", "≤ 300", extra <= 300, {})


def tile_training(threads: int) -> Result:
    """A score with tile() alone, forward and backward, over the same operations in full."""
    q, k, v = torch.randn(3, 1, 8, 1024, 64)
    inputs, grad = [t.requires_grad_() for t in (q, k, v)], torch.randn(1, 8, 1024, 64)

    def score(query: Tensor, key: Tensor) -> Tensor:
        return (query @ key.mT).sin()

    calls = {
        "eager": both_ways(lambda: score(q, k).softmax(-1) @ v, inputs, grad),
        "clearhead": both_ways(lambda: ch.attention(q, k, v, score=score), inputs, grad),
    }
    agree(calls["clearhead"]()[0], calls["eager"]()[0])
    torch.set_num_threads(threads)
    seconds = interleaved(calls, 15, 2)
    torch.set_num_threads(2)
    ratio = seconds["clearhead"] / seconds["eager"]
    what = f"a score with tile() alone at (1,8,1024,64), {threads} thread(s), forward + backward, over eager operations"
    return Result(what, ratio, "×", "≤ 2", ratio <= 2, times(seconds))


def _trained(module: torch.nn.Module, x: Tensor, **options: bool) -> Callable[[], Tensor]:
    """Forward and backward, self-attention."""

    def step() -> Tensor:
        with torch.enable_grad():
            out = module(x, x, x, **options)
            out = out[0] if isinstance(out, tuple) else out
            module.zero_grad()
            x.grad = None
            out.sum().backward()
        return out.detach()

    return step


def multi_head(weights: bool) -> Result:
    own = torch.nn.MultiheadAttention(512, 8, dropout=0.0, batch_first=True)
    x = torch.randn(8, 512, 512, requires_grad=True)
    calls = {
        f"torch, need_weights={weights}": _trained(own, x, need_weights=weights),
        "clearhead": _trained(ch.nn.MultiHeadAttention.from_torch(own), x),
    }
    what = f"MultiHeadAttention forward + backward at (8,512,512), 8 heads, over torch's, need_weights={weights}"
    return faster(what, 2 if weights else 1, calls, 15)


def prepared_keys(attend: ch.nn.AdditiveAttention | ch.nn.MultiHeadAttention) -> Result:
    """A decoder that asks one query at a time."""
    memory, queries = torch.randn(32, 256, 512), torch.randn(10, 32, 1, 512)

    def once() -> Tensor:
        prepared = attend.prepare(memory, memory)
        return torch.cat([attend(query, prepared) for query in queries])

    calls = {
        "projected each time": lambda: torch.cat([attend(query, memory, memory) for query in queries]),
        "prepared": once,
    }
    what = f"{type(attend).__name__}, ten queries on (32,256,512), keys prepared once, over each time"
    return faster(what, 1.5, calls, 7)


def multi_head_memory() -> Result:
    own, theirs = peak_mib("multi_head_8192"), peak_mib("torch_multi_head_8192")
    what = (
        f"the same, training at (1,8192,512): extra memory {own:.0f} MiB, torch's with need_weights=True {theirs:.0f}"
    )
    return Result(what, own / theirs, "×", "≤ 0.1", own / theirs <= 0.1, {})


def dropout() -> Result:
    q = torch.randn(1, 8, 2048, 64)
    calls = {
        "without": lambda: ch.attention(q, q, q, engine="tiled"),
        "dropout": lambda: ch.attention(q, q, q, engine="tiled", dropout_p=0.1),
    }
    seconds = interleaved(calls, 7, 1)
    ratio = seconds["dropout"] / seconds["without"]
    return Result("dropout on tiled at (1,8,2048,64), over none", ratio, "×", "", True, times(seconds))


def _additive(query: Tensor, key: Tensor, value: Tensor, w: Tensor) -> Tensor:
    """The eager formula, over projected query and key."""
    return torch.softmax(torch.tanh(query[:, :, None] + key[:, None]) @ w, -1) @ value


def additive(
    batch: int, queries: int, keys: int, hidden: int, against: str, bar: float, train: bool, rounds: int
) -> Result:
    q, k, v = leaves((batch, queries, hidden), (batch, keys, hidden), (batch, keys, hidden))
    score = ch.Additive.from_weights(None, None, (torch.rand(hidden) * 2 - 1) / hidden**0.5)
    grad = torch.randn(batch, queries, hidden)
    formula = torch.compile(_additive, dynamic=False) if against == "compile" else _additive

    def run(attend: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def step() -> Tensor:
            with torch.set_grad_enabled(train):
                out = attend()
                return torch.autograd.grad(out, (q, k, v, score.w_v), grad)[1] if train else out

        return step

    calls = {
        against: run(lambda: formula(q, k, v, score.w_v)),
        "clearhead": run(lambda: ch.attention(q, k, v, score=score)),
    }
    shape = (batch, queries, keys, hidden)
    what = f"additive {'forward + backward' if train else 'forward'} at {shape}, over {against}"
    return faster(what, bar, calls, rounds)


def additive_memory() -> Result:
    extra = peak_mib("additive_training_4096")
    what = "additive, forward + backward at (1,4096,4096,64): extra memory"
    return Result(what, extra, "MiB", "≤ 64", extra <= 64, {})


def dense_dot(causal: bool, bar: float) -> Result:
    q, k, v = torch.randn(3, 2, 8, 2048, 64)
    mask = ch.Causal() if causal else None
    calls = {
        "sdpa": lambda: sdpa(q, k, v, is_causal=causal),
        "clearhead": lambda: ch.attention(q, k, v, mask=mask),
    }
    return faster(f"dot {'causal' if causal else 'dense'} at (2,8,2048,64), over SDPA", bar, calls, 15)


def window_training() -> Result:
    q, k, v = leaves(*3 * [(1, 8, 8192, 64)])
    mask, grad = ch.SlidingWindow(before=255), torch.randn(1, 8, 8192, 64)
    keep = mask.dense(q, k)

    def step(attend: Callable[[], Tensor]) -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(attend(), (q, k, v), grad)[0]

    calls = {
        "sdpa, bool mask": lambda: step(lambda: sdpa(q, k, v, attn_mask=keep)),
        "clearhead": lambda: step(lambda: ch.attention(q, k, v, mask=mask)),
    }
    return faster("the same window, forward + backward", 15, calls, 3)


def documents() -> Result:
    q, k, v = torch.randn(3, 1, 8, 4096, 64)
    mask = ch.Documents.from_lengths([512] * 8) & ch.Causal()
    keep = mask.dense(q, k)
    calls = {
        "sdpa, bool mask": lambda: sdpa(q, k, v, attn_mask=keep),
        "clearhead": lambda: ch.attention(q, k, v, mask=mask),
    }
    return faster("8 packed causal documents at (1,8,4096,64), over SDPA with a bool mask", 12, calls, 7)


def _step(inputs: list[Tensor], results: Callable[[], tuple[Tensor, ...]]) -> Callable[[], Tensor]:
    """Forward and backward, each result with a gradient of its own."""
    with torch.no_grad():
        grads = [torch.randn_like(t) for t in results()]

    def step() -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(results(), inputs, grads)[0]

    return step


def statistics(bar: float, *more: ch.reductions.Received) -> Result:
    """Output, entropy and log-sum-exp, forward + backward, over attention alone."""
    inputs = leaves(*3 * [(1, 8, 2048, 64)])
    q, k, v = inputs

    def reduced() -> tuple[Tensor, ...]:
        return ch.weights(q, k).reduce(
            ch.reductions.Output(v), ch.reductions.Entropy(), ch.reductions.LogSumExp(), *more
        )

    calls = {"attention": _step(inputs, lambda: (ch.attention(q, k, v),)), "statistics": _step(inputs, reduced)}
    agree(reduced()[0].detach(), sdpa(q, k, v).detach())
    seconds = interleaved(calls, 11, 1)
    ratio = seconds["statistics"] / seconds["attention"]
    what = (
        f"output, entropy, log-sum-exp{', received' * len(more)}, forward + backward at (1,8,2048,64), over attention's"
    )
    return Result(what, ratio, "×", f"≤ {bar}", ratio <= bar, times(seconds))


def weight_gradients() -> Result:
    """The positive part of weights times their gradients, summed by key, over one backward pass of attention."""
    inputs = leaves(*3 * [(1, 8, 2048, 64)])
    q, k, v = (t.detach() for t in inputs)
    grad = torch.randn(1, 8, 2048, 64)
    with torch.enable_grad():
        output = ch.attention(*inputs)
    calls = {
        "backward": lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True),
        "sums by key": lambda: ch.weights(q, k).gradients(v, grad).by_key(positive=True),
    }
    products = (ch.weights(q, k).dense(None) * (grad @ v.mT)).clamp(min=0)
    agree(calls["sums by key"](), products.sum(-2))
    seconds = interleaved(calls, 11, 1)
    ratio = seconds["sums by key"] / seconds["backward"]
    what = "positive part of weights times gradients, by key, at (1,8,2048,64), over one backward"
    return Result(what, ratio, "×", "≤ 1.2", ratio <= 1.2, times(seconds))


def statistics_memory() -> Result:
    extra = peak_mib("statistics_16384")
    what = "output, entropy, log-sum-exp, received, forward + backward at (1,8,16384,64): extra memory"
    return Result(what, extra, "MiB", "≤ 300", extra <= 300, {})


def forward_mode(train: bool, bar: float) -> Result:
    name = "jvp_training_2048" if train else "jvp_2048"
    own, theirs = peak_mib(name), peak_mib(f"sdpa_{name}")
    more = " with a backward pass of the primal" if train else ""
    what = f"jvp{more} at (1,8,2048,64): extra memory {own:.0f} MiB, over SDPA's math path, {theirs:.0f}"
    return Result(what, own / theirs, "×", f"≤ {bar:.3f}", own / theirs <= bar, {})


def choice(dtype: torch.dtype) -> Result:
    """The choice of an engine, forward + backward, over the best of those that could run it."""
    inputs = [torch.randn(2, 8, 2048, 64, dtype=dtype, requires_grad=True) for _ in range(3)]
    grad = torch.randn(2, 8, 2048, 64, dtype=dtype)

    def run(engine: str | None) -> Callable[[], Tensor]:
        def step() -> Tensor:
            with torch.enable_grad():
                return torch.autograd.grad(ch.attention(*inputs, engine=engine), inputs, grad)[0]

        return step

    calls = {"chosen": run(None), "sdpa": run("sdpa"), "native": run("native")}
    seconds = interleaved(calls, 3, 1)
    ratio = seconds["chosen"] / min(seconds["sdpa"], seconds["native"])
    what = f"{dtype} at (2,8,2048,64), forward + backward: the engine chosen, over the best"
    return Result(what, ratio, "×", "≤ 1.15", ratio <= 1.15, times(seconds))


CASES: dict[str, Callable[[], Result]] = {
    "import": importing,
    "small": lambda: small(0.6, causal=False),
    "small-causal": lambda: small(0.9, causal=True),
    "small-backward": lambda: small_backward(2.0, causal=False),
    "small-causal-backward": lambda: small_backward(2.0, causal=True),
    "overhead-512": overhead_512,
    "window": window,
    "padded": padded,
    "grouped-decode": grouped_decode,
    "reduce-1024": lambda: inspection(1024, 15),
    "reduce-4096": lambda: inspection(4096, 5),
    "reduce-16384": lambda: inspection(16384, 3),
    "reduce-memory": reduce_memory,
    "training-memory": training_memory,
    "training-tile-1": partial(tile_training, 1),
    "training-tile-2": partial(tile_training, 2),
    "multi-head": lambda: multi_head(weights=False),
    "multi-head-weights": lambda: multi_head(weights=True),
    "multi-head-memory": multi_head_memory,
    "prepared-additive": lambda: prepared_keys(ch.nn.AdditiveAttention(256).eval()),
    "prepared-heads": lambda: prepared_keys(ch.nn.MultiHeadAttention(512, 8).eval()),
    "dropout": dropout,
    "additive-256": lambda: additive(4, 256, 256, 256, "compile", 20, False, 15),
    "additive-1024": lambda: additive(2, 1024, 1024, 128, "compile", 20, False, 7),
    "additive-256-eager": lambda: additive(4, 256, 256, 256, "eager", 50, False, 9),
    "additive-1024-eager": lambda: additive(2, 1024, 1024, 128, "eager", 50, False, 3),
    "additive-256-training": lambda: additive(4, 256, 256, 256, "compile", 25, True, 7),
    "additive-1024-training": lambda: additive(2, 1024, 1024, 128, "compile", 25, True, 3),
    "additive-decode": lambda: additive(32, 1, 512, 512, "compile", 4.5, False, 31),
    "additive-memory": additive_memory,
    "dense": lambda: dense_dot(causal=False, bar=1.2),
    "causal": lambda: dense_dot(causal=True, bar=1.35),
    "window-training": window_training,
    "documents": documents,
    "statistics": lambda: statistics(1.25),
    "statistics-received": lambda: statistics(1.5, ch.reductions.Received()),
    "statistics-memory": statistics_memory,
    "weight-gradients": weight_gradients,
    **masks.CASES,
    **functions.CASES,
    **watching.CASES,
    **editing.CASES,
    **audits.CASES,
    **calls.CASES,
    **decoding.CASES,
    **end_to_end.CASES,
    **training.CASES,
    **explaining.CASES,
    **pages.CASES,
    **browsing.CASES,
    **sharding.CASES,
    **surveying.CASES,
    "jvp": lambda: forward_mode(False, 1 / 8),
    "jvp-training": lambda: forward_mode(True, 1 / 6),
    "bfloat16": lambda: choice(torch.bfloat16),
    "float16": lambda: choice(torch.float16),
    **low_precision.CASES,
}
