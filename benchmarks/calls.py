"""Small calls, where Python takes most of the time: calls of clearhead's functions, and the time of a decoding step."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead as ch
from benchmarks.measure import interleaved
from benchmarks.result import Result, agree, times

PACKAGE = str(Path(ch.__file__).parent)
UNEQUAL = [64, 40, 17, 52]  # the lengths of four prompts
WIDTH, HEADS, KEY_HEADS, PROMPT, STEPS = 256, 8, 2, 64, 64


def count_calls(run: Callable[[], object]) -> int:
    """How often `run` calls a Python function of the package."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def measure_calls(what: str, bar: int, run: Callable[[], object]) -> Result:
    for _ in range(3):  # what is kept between calls is there
        run()
    calls = count_calls(run)
    return Result(f"calls of clearhead's functions in {what}", calls, "calls", f"≤ {bar}", calls <= bar, {})


def count_in_attention(bar: int) -> Result:
    q = torch.randn(1, 8, 16, 64)
    return measure_calls("attention(Causal()) at (1,8,16,64)", bar, lambda: ch.attention(q, q, q, mask=ch.Causal()))


def count_in_step(what: str, bar: int, capacity: int | None = None, lengths: list[int] | None = None) -> Result:
    """Calls in one step of decoding, after prompts of 64 tokens or of these lengths."""
    attend, cache = ch.nn.MultiHeadAttention(256, 8).eval(), ch.nn.KeyValueCache(capacity)
    prompts, token = torch.randn(4, 64, 256), torch.randn(4, 1, 256)
    with torch.no_grad():
        attend(prompts, prompts, prompts, ch.Causal(), cache=cache, new_lens=lengths)
        step = partial(attend, token, token, token, ch.Causal(), cache=cache)
        return measure_calls(f"a step of MultiHeadAttention, {what}", bar, step)


class PlainAttention(nn.Module):
    """The same layer as a user would write it: linear layers, rotary positions, `torch.cat` and SDPA."""

    def __init__(self, like: ch.nn.MultiHeadAttention) -> None:
        super().__init__()
        self.layers = nn.ModuleList([like.W_q, like.W_k, like.W_v, like.W_o])
        width = like.head_dim
        angles = torch.arange(2 * (PROMPT + STEPS))[:, None] * 10000 ** (-torch.arange(0, width, 2) / width)
        self.cos, self.sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)

    def rotate(self, x: Tensor, start: int) -> Tensor:
        rows = slice(start, start + x.shape[-2])
        left, right = x.chunk(2, -1)
        return x * self.cos[rows] + torch.cat([-right, left], -1) * self.sin[rows]

    def forward(self, x: Tensor, cache: list[Tensor], start: int) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in zip(self.layers, (HEADS, KEY_HEADS, KEY_HEADS), strict=False)
        )
        query, key = self.rotate(query, start), self.rotate(key, start)
        if cache:
            key, value = torch.cat([cache[0], key], 2), torch.cat([cache[1], value], 2)
        cache[:] = [key, value]
        output = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, is_causal=x.shape[1] > 1)
        joined: Tensor = self.layers[3](output.transpose(1, 2).flatten(2))
        return joined


def time_step(what: str, bar: float, capacity: int | None = None, lengths: list[int] | None = None) -> Result:
    """The time of 64 eager steps of one layer, over plain code beside which all prompts have one length."""
    rotary = ch.nn.RotaryEmbedding(WIDTH // HEADS)
    attend = ch.nn.MultiHeadAttention(WIDTH, HEADS, bias=False, num_kv_heads=KEY_HEADS, rotary=rotary).eval()
    plain, prompts = PlainAttention(attend), torch.randn(4, PROMPT, WIDTH)
    tokens = [torch.randn(4, 1, WIDTH) for _ in range(STEPS)]
    caches: dict[str, Any] = {}

    @torch.no_grad()
    def start() -> None:
        caches["ours"], caches["plain"] = ch.nn.KeyValueCache(capacity), []
        attend(prompts, prompts, prompts, ch.Causal(), cache=caches["ours"], new_lens=lengths)
        plain(prompts, caches["plain"], 0)

    @torch.no_grad()
    def run_ours() -> Tensor:
        return torch.cat([attend(token, token, token, ch.Causal(), cache=caches["ours"]) for token in tokens])

    @torch.no_grad()
    def run_plain() -> Tensor:
        return torch.cat([plain(token, caches["plain"], PROMPT + n) for n, token in enumerate(tokens)])

    torch.set_num_threads(1)
    start()
    if lengths is None:
        agree(run_ours(), run_plain())
    seconds: dict[str, list[float]] = {"plain": [], "clearhead": []}
    for _ in range(15):
        start()
        for name, found in interleaved({"plain": run_plain, "clearhead": run_ours}, 1, 0).items():
            seconds[name].append(found)
    medians = {name: statistics.median(found) / STEPS for name, found in seconds.items()}
    ratio = medians["clearhead"] / medians["plain"]
    return Result(
        f"a step of one layer, {what}, over plain SDPA code", ratio, "×", f"≤ {bar}", ratio <= bar, times(medians)
    )


CASES: dict[str, Callable[[], Result]] = {
    "calls-causal": lambda: count_in_attention(55),
    "calls-step": lambda: count_in_step("a cache that grows", 70),
    "calls-step-capacity": lambda: count_in_step("a cache with a capacity", 100, 256),
    "calls-step-unequal": lambda: count_in_step("prompts of unequal lengths", 100, None, UNEQUAL),
    "calls-step-capacity-unequal": lambda: count_in_step("unequal lengths with a capacity", 100, 256, UNEQUAL),
    "step": lambda: time_step("a cache that grows", 1.7),
    "step-capacity": lambda: time_step("a cache with a capacity", 2.2, 256),
    "step-unequal": lambda: time_step("prompts of unequal lengths", 2.2, None, UNEQUAL),
    "step-capacity-unequal": lambda: time_step("unequal lengths with a capacity", 2.2, 256, UNEQUAL),
}
