"""bfloat16 and float16 on a CPU: beside the same kernels on copies in float32, and beside PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
from benchmarks.measure import interleaved
from benchmarks.result import Result, times

Run = Callable[..., Tensor]


def _over(what: str, bar: float, calls: dict[str, Callable[[], Any]], rounds: int, threads: int) -> Result:
    """How many times faster the last call is than the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seconds = interleaved(calls, rounds, 2)
    finally:
        torch.set_num_threads(before)
    names = list(calls)
    ratio = seconds[names[0]] / seconds[names[-1]]
    many = "1 thread" if threads == 1 else f"{threads} threads"
    shown = f"{what}, {many}: over {names[0]}"
    return Result(shown, ratio, "× faster", f"≥ {bar}", ratio >= bar, times(seconds))


def _ours(mask: Any, *inputs: Tensor) -> Tensor:
    return ch.attention(*inputs, mask=mask, engine="native")


def _copied(mask: Any, *inputs: Tensor) -> Tensor:
    return _ours(mask, *(t.float() for t in inputs)).to(inputs[0].dtype)


def _torchs(mask: Any, *inputs: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*inputs, is_causal=mask is not None, enable_gqa=True)


MASKS: dict[str, Callable[[int], Any]] = {
    "dense": lambda _: None,
    "causal": lambda _: ch.Causal(),
    "window": lambda _: ch.Causal() & ch.SlidingWindow(before=256),
    "documents": lambda length: ch.Documents((torch.arange(length) // 512)[None]),
}


def forward(kind: str, width: int, threads: int, peer: Run, bar: float) -> Result:
    length = 1024 if kind in ("dense", "causal") else 4096
    inputs = torch.randn(3, 1, 4, length, width).bfloat16()
    mask = MASKS[kind](length)
    calls = {_name(peer): lambda: peer(mask, *inputs), "read where they lie": lambda: _ours(mask, *inputs)}
    return _over(f"bfloat16 {kind} at (1,4,{length},{width})", bar, calls, 9, threads)


def backward(causal: bool, width: int, threads: int, peer: Run, bar: float) -> Result:
    inputs = [torch.randn(1, 4, 1024, width).bfloat16().requires_grad_() for _ in range(3)]
    grad, mask = torch.randn(1, 4, 1024, width).bfloat16(), ch.Causal() if causal else None

    def run(attend: Run) -> Callable[[], Any]:
        with torch.enable_grad():
            output = attend(mask, *inputs)
        return lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)

    calls = {_name(peer): run(peer), "read where they lie": run(_ours)}
    what = f"bfloat16 {'causal' if causal else 'dense'} at (1,4,1024,{width}), backward alone"
    return _over(what, bar, calls, 7, threads)


def decode(dtype: torch.dtype, threads: int, peer: Run, bar: float) -> Result:
    """One token at 8,192 keys, 32 heads over 8. A float32 cache is read by `_float32`, which copies nothing."""
    query, cache = torch.randn(1, 32, 1, 128).to(dtype), torch.randn(2, 1, 8, 8192, 128).to(dtype)
    inputs = (query, *cache)
    given = tuple(t.float() for t in inputs) if peer is _float32 else inputs
    calls = {_name(peer): lambda: peer(None, *given), "read where they lie": lambda: _ours(None, *inputs)}
    return _over(f"{dtype} decoding at 8,192 keys", bar, calls, 15, threads)


def _float32(mask: Any, *inputs: Tensor) -> Tensor:
    return _ours(mask, *inputs)


def _name(peer: Run) -> str:
    return {_copied: "float32 copies", _torchs: "SDPA", _float32: "a cache in float32"}[peer]


def llama(prefill: bool, threads: int) -> Result:
    """A small Llama with random weights: tokens per second of a prompt, or of decoding after one."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "vocab_size": 1000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).bfloat16().eval()
    length = 2048 if prefill else 4096
    prompt = torch.randint(0, 1000, (1, length))
    cache = DynamicCache()
    if not prefill:
        model(prompt, past_key_values=cache)

    def run() -> None:
        if prefill:
            model(prompt, use_cache=False)
        else:
            model(prompt[:, :1], past_key_values=cache)
            cache.crop(-1)

    def on(implementation: str) -> Callable[[], None]:
        def step() -> None:
            model.set_attn_implementation(implementation)
            run()

        return step

    ch.models.run_on_clearhead(model)
    own = model.config._attn_implementation
    calls = {"SDPA": on("sdpa"), "clearhead": on(own)}
    what = f"a Llama in bfloat16, {'a prompt of 2,048' if prefill else 'decoding after 4,096'}"
    return _over(what, 1.0, calls, 5 if prefill else 21, threads)


CASES: dict[str, Callable[[], Result]] = {}
for _threads in (1, 2):
    for _width, _bar in ((64, 1.6), (128, 1.7)):
        _at = f"{_width}-{_threads}"
        for _kind in MASKS:
            CASES[f"low-{_kind}-{_at}"] = partial(forward, _kind, _width, _threads, _copied, _bar)
        for _causal, _kind in ((False, "dense"), (True, "causal")):
            CASES[f"low-{_kind}-{_at}-sdpa"] = partial(forward, _kind, _width, _threads, _torchs, 1.5)
            CASES[f"low-backward-{_kind}-{_at}"] = partial(backward, _causal, _width, _threads, _copied, 1.6)
            CASES[f"low-backward-{_kind}-{_at}-sdpa"] = partial(backward, _causal, _width, _threads, _torchs, 1.0)
    for _name_, _dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        CASES[f"low-decode-{_name_}-{_threads}"] = partial(decode, _dtype, _threads, _copied, 5.0)
        CASES[f"low-decode-{_name_}-{_threads}-float32"] = partial(decode, _dtype, _threads, _float32, 1 / 0.75)
        CASES[f"low-decode-{_name_}-{_threads}-sdpa"] = partial(decode, _dtype, _threads, _torchs, 1.0)
    CASES[f"low-llama-prefill-{_threads}"] = partial(llama, True, _threads)
    CASES[f"low-llama-decode-{_threads}"] = partial(llama, False, _threads)
