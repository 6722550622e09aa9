"""Whole models of transformers, as people judge them: under `run_on_clearhead`, beside SDPA and compiled FlexAttention.

A Llama of four layers of 8 heads over 2, and a Mistral of the same sizes with a window of 256, with random weights.
Both sides are one model, whose backend is changed between the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import clearhead as ch
from benchmarks.measure import interleaved
from benchmarks.result import Result, times

LENGTH, WORDS, WINDOW, DOCUMENTS = 4096, 1000, 256, 8
STEPS = 8  # tokens that one run decodes
SIZES = {
    "vocab_size": WORDS, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2 * LENGTH,
}  # fmt: skip
FLEX = "flex_attention"
Call = Callable[[], Any]


def made(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model, in evaluation, that runs on clearhead."""
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    if kind == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    else:
        model = MistralForCausalLM(MistralConfig(sliding_window=WINDOW, **SIZES))
    return ch.models.run_on_clearhead(model.to(dtype).eval())


def sides(model: Any, other: str, run: Call) -> dict[str, Call]:
    """The same run on another backend of the model, and on clearhead."""
    own = model.config._attn_implementation

    def on(backend: str) -> Any:
        model.set_attn_implementation(backend)
        return run()

    return {other: partial(on, other), "clearhead": partial(on, own)}


def tokens() -> Tensor:
    return torch.randint(0, WORDS, (1, LENGTH))


def prefill(kind: str, other: str, bar: float) -> Result:
    """The logits of a prompt."""
    model, prompt = made(kind), tokens()
    calls = sides(model, other, lambda: model(prompt, use_cache=False).logits)
    same([calls["clearhead"]()], [calls[other]()], 1e-4)
    return compared(f"{kind}, a prompt of {LENGTH} tokens, float32", LENGTH, bar, calls, 5)


def training(kind: str, packed: bool, bar: float) -> Result:
    """A forward and a backward pass, with a gradient for each parameter."""
    model, ids = made(kind).train(), tokens()
    positions = torch.arange(LENGTH)[None] % (LENGTH // DOCUMENTS if packed else LENGTH)

    def step() -> list[Tensor]:
        model.zero_grad()
        with torch.enable_grad():
            # without a cache, transformers sees that position ids begin again, and SDPA gets a block-diagonal mask
            found = model(ids, position_ids=positions, labels=ids, use_cache=False)
            found.loss.backward()
        return [found.logits.detach(), *(p.grad for p in model.parameters())]

    calls = sides(model, "sdpa", step)
    same(calls["clearhead"](), calls["sdpa"](), 1e-4)
    how = f"{DOCUMENTS} documents packed into {LENGTH} tokens" if packed else f"{LENGTH} tokens"
    return compared(f"{kind}, forward + backward on {how}, float32", LENGTH, bar, calls, 3)


def decode(batch: int, dtype: torch.dtype, static: bool) -> Result:
    """A token of each sequence at a time, eager, after a prompt that both sides' one cache holds."""
    from transformers import DynamicCache, StaticCache

    model = made("llama", dtype)
    prompt, later = torch.randint(0, WORDS, (batch, LENGTH)), torch.randint(0, WORDS, (STEPS, batch, 1))
    cache: Any = StaticCache(config=model.config, max_cache_len=LENGTH + 64) if static else DynamicCache()
    model(prompt, past_key_values=cache, logits_to_keep=1)

    def run() -> Tensor:
        found = [model(ids, past_key_values=cache, position_ids=at(i)).logits for i, ids in enumerate(later)]
        if static:
            for layer in cache.layers:
                layer.cumulative_length.fill_(LENGTH)
        else:
            cache.crop(-STEPS)
        return torch.cat(found, 1)

    def at(step: int) -> Tensor:
        return torch.full((batch, 1), LENGTH + step)

    calls = sides(model, "sdpa", run)
    same([calls["clearhead"]()], [calls["sdpa"]()], 1e-4 if dtype == torch.float32 else 3e-2)
    what = f"llama, decoding after {LENGTH} tokens, batch {batch}, {str(dtype).removeprefix('torch.')}"
    return compared(f"{what}, a {type(cache).__name__} on both sides", batch * STEPS, 1, calls, 5)


def same(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    """No figure for other numbers: the largest difference of each tensor is small beside its largest number."""
    for one, other in zip(got, want, strict=True):
        one, other = one.float(), other.float()
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * float(other.abs().max()))


def compared(what: str, count: int, bar: float, calls: dict[str, Call], rounds: int) -> Result:
    """How many times faster the last call is than the first, each of which takes `count` tokens."""
    seconds = interleaved(calls, rounds, 1)
    other, own = seconds
    ratio = seconds[other] / seconds[own]
    speed = ", ".join(f"{name} {count / s:,.0f}" for name, s in seconds.items())
    shown = f"{what}, over {other}; tokens a second: {speed}"
    return Result(shown, ratio, "× faster", f"≥ {bar}", ratio >= bar, times(seconds))


CASES: dict[str, Callable[[], Result]] = {
    "llama-prefill": partial(prefill, "llama", "sdpa", 1),
    "llama-prefill-flex": partial(prefill, "llama", FLEX, 1),
    "llama-training": partial(training, "llama", False, 1),
    "mistral-prefill": partial(prefill, "mistral", "sdpa", 2.07),
    "mistral-prefill-flex": partial(prefill, "mistral", FLEX, 1),
    "mistral-training": partial(training, "mistral", False, 1),
    "packed-training": partial(training, "llama", True, 5),
}
for _batch in (1, 8):
    for _name, _dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        CASES[f"llama-decode-{_batch}-{_name}"] = partial(decode, _batch, _dtype, False)
        CASES[f"llama-decode-{_batch}-{_name}-static"] = partial(decode, _batch, _dtype, True)
