"""Real models watched while they run, over the same model alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
from benchmarks.measure import interleaved, peak_mib
from benchmarks.result import Result, times
from clearhead.models.loading import bundled
from clearhead.models.recordings.distinctive import measured
from clearhead.models.recordings.tokens import Tokens

os.environ["HF_HUB_OFFLINE"] = "1"
FOUR = [ch.reductions.Entropy(), ch.reductions.TopK(5), ch.reductions.Received(), ch.reductions.LogSumExp()]


def bert() -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(bundled(), local_files_only=True).eval()


def llama(layers: int = 4, heads: int = 8, width: int = 512) -> Any:
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(
        LlamaConfig(
            vocab_size=1000,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=8192,
        )
    ).eval()


def keep(make: Callable[[], Any], length: int, bar: float, fuse: bool = False) -> Result:
    model, ids = make(), torch.randint(0, 1000, (1, length))

    def watched() -> None:
        with ch.models.statistics(model, FOUR, fuse=fuse):
            model(ids)

    calls = {"plain": lambda: model(ids), "watched": watched}
    seconds = interleaved(calls, 9 if length > 1000 else 41, 2)
    ratio = seconds["watched"] / seconds["plain"]
    how = "four reductions of every call" + (", the output with them" if fuse else "")
    what = f"{type(model).__name__} on {length} tokens, {how}, over the plain forward"
    return Result(what, ratio, "×", f"≤ {bar}", ratio <= bar, times(seconds))


def keep_memory() -> Result:
    """What the two recordings hold, in a process each."""
    kept, recorded = peak_mib("watch_keep"), peak_mib("watch_record")
    what = f"Llama on 4096 tokens, statistics of Entropy and TopK(5), {kept:.0f} MiB, over a watch that keeps q and k"
    return Result(what, kept / recorded, "×", "≤ 0.2", kept <= recorded / 5, {})


def lazy_time() -> Result:
    model, ids = llama(), torch.randint(0, 1000, (1, 3072))

    def lazy() -> None:
        with ch.models.lazy_attentions(model):
            model(ids, output_attentions=True)

    seconds = interleaved({"plain": lambda: model(ids), "lazy": lazy}, 9, 2)
    ratio = seconds["lazy"] / seconds["plain"]
    what = "Llama on 3072 tokens, its attentions lazy, over the plain forward"
    return Result(what, ratio, "×", "≤ 1.1", ratio <= 1.1, times(seconds))


def lazy_memory() -> Result:
    """The two peaks, in a process each."""
    plain, lazy = peak_mib("no_attentions"), peak_mib("lazy_attentions")
    more = (lazy - plain) * 2**20 / 1e6
    what = f"Llama on 3072 tokens, its attentions lazy, {lazy:.0f} MiB, less the plain forward's, {plain:.0f} MiB"
    return Result(what, more, "MB", "≤ 60", more <= 60, {})


def generating(length: int, new: int = 100) -> tuple[Any, Callable[[], Any]]:
    """A small Llama as above, with two key heads, and a call that lets it generate."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "max_position_embeddings": 8192}
    config = LlamaConfig(
        vocab_size=1000, num_attention_heads=8, num_key_value_heads=2, eos_token_id=None, pad_token_id=0, **sizes
    )
    model, ids = LlamaForCausalLM(config).eval(), torch.randint(1, 1000, (1, length))
    return model, lambda: model.generate(ids, max_new_tokens=new, do_sample=False)


def joined() -> Result:
    model, generate = generating(2048)

    def watched() -> None:
        with ch.watch(model) as seen:
            generate()
        for name in seen.names:
            seen[name].joined()

    seconds = interleaved({"plain": generate, "joined": watched}, 9, 1)
    ratio = seconds["joined"] / seconds["plain"]
    what = "Llama, 2048 + 100 tokens generated, watched, and each layer's steps joined, over plain generation"
    return Result(what, ratio, "×", "≤ 1.1", ratio <= 1.1, times(seconds))


def joined_memory() -> Result:
    held = peak_mib("watch_generation") * 2**20 / 1e6
    what = "what the recording of 2048 + 100 generated tokens holds, in a process of its own"
    return Result(what, held, "MB", "≤ 30", held <= 30, {})


class Causal(torch.nn.Module):
    """One causal head of SDPA's."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def long_head(length: int) -> tuple[Any, list[Tensor]]:
    return Causal(), list(torch.randn(3, 1, 1, length, 64))


def recorded(model: Any, *inputs: Tensor) -> ch.models.Recording:
    with ch.watch(model, values=True) as seen:
        model(*inputs)
    return seen


def words(length: int, count: int = 5000) -> Tensor:
    """Ids of tokens, as often as Zipf's law says."""
    return torch.multinomial(1 / torch.arange(1, count + 1), length, replacement=True)


def ten_measures(length: int = 16384, bar: float = 2.5) -> Result:
    model, inputs = long_head(length)
    call, tokens = recorded(model, *inputs)[0], Tokens(words(length), None)
    calls = {"sdpa": lambda: model(*inputs), "measures": lambda: measured(call, tokens)}
    assert len(calls["measures"]()) == 10
    seconds = interleaved(calls, 7, 1)
    ratio = seconds["measures"] / seconds["sdpa"]
    what = f"ten measures of a causal head of {length} words by Zipf's law, over its SDPA forward"
    return Result(what, ratio, "×", f"≤ {bar}", ratio <= bar, times(seconds))


def compared(make: Callable[[], tuple[Any, list[Tensor]]], of: str, bar: float) -> Result:
    model, inputs = make()
    one = recorded(model, *inputs)
    if inputs[0].is_floating_point():
        other = recorded(model, inputs[0] + 0.1 * torch.randn_like(inputs[0]), *inputs[1:])
    else:
        other = recorded(model, inputs[0].flip(-1))
    calls = {"plain": lambda: model(*inputs), "compared": lambda: one.compare(other)}
    seconds = interleaved(calls, 5, 1)
    ratio = seconds["compared"] / seconds["plain"]
    what = f"two recordings of {of} compared, over the plain forward"
    return Result(what, ratio, "×", f"≤ {bar}", ratio <= bar, times(seconds))


CASES: dict[str, Callable[[], Result]] = {
    "keep-bert-128": partial(keep, bert, 128, 1.25),
    "keep-bert-500": partial(keep, bert, 500, 1.2),
    "keep-llama-4096": partial(keep, llama, 4096, 1.15),
    "fuse-llama-4096": partial(keep, llama, 4096, 1.0, fuse=True),
    "keep-memory": keep_memory,
    "lazy-llama-3072": lazy_time,
    "lazy-memory": lazy_memory,
    "ten-measures-16384": ten_measures,
    "compare-16384": partial(compared, partial(long_head, 16384), "a causal head of 16384 words", 20.0),
    "compare-bert-512": partial(
        compared, lambda: (bert(), [torch.randint(0, 1000, (1, 512))]), "BERT, 512 words,", 8.0
    ),
    "joined": joined,
    "joined-memory": joined_memory,
}
