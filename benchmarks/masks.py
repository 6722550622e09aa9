"""Masks that leave most pairs out: beside compiled FlexAttention, and for each allowed pair."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import clearhead as ch
from benchmarks.measure import interleaved
from benchmarks.result import Result, faster, leaves, times

SIZE = 4096
NAMES = ("rule", "arithmetic", "streaming", "window", "packed", "prefix", "global", "random")
EDGE = 128  # of the blocks of the random rules


def _blocks(share: float) -> Tensor:
    """Which blocks of EDGE × EDGE pairs a random rule allows; those on the diagonal always."""
    count = SIZE // EDGE
    return (torch.rand(count, count) < share) | torch.eye(count, dtype=torch.bool)


def _rules() -> dict[str, tuple[str, Callable[..., Tensor], ch.extend.Mask]]:
    """Masks that FlexAttention takes as a rule of four indices, and clearhead as an expression."""
    blocks, tenth, documents = _blocks(0.25), _blocks(0.1), torch.arange(SIZE) // 512
    rule = lambda b, h, i, j: blocks[i // EDGE, j // EDGE]  # noqa: E731
    first = ch.MaskFunction(lambda b, h, i, j: i < 64, reads=())
    numbers = lambda b, h, i, j: (i // 256 * 7 + j // 256 * 3) % 4 == 0  # noqa: E731
    whole = tenth.repeat_interleave(EDGE, 0).repeat_interleave(EDGE, 1)
    return {
        "rule": ("a rule by blocks, 25%", rule, ch.MaskFunction(rule, reads=[blocks])),
        "arithmetic": ("a rule that reads nothing, 25%", numbers, ch.MaskFunction(numbers)),
        "streaming": (
            "Causal() & (SlidingWindow(before=255) | FirstKeys(4))",
            lambda b, h, i, j: (j <= i) & ((i - j <= 255) | (j < 4)),
            ch.Causal() & (ch.SlidingWindow(before=255) | ch.FirstKeys(4)),
        ),
        "window": ("a window of 256", lambda b, h, i, j: (j <= i) & (i - j <= 255), ch.SlidingWindow(before=255)),
        "packed": (
            "8 documents",
            lambda b, h, i, j: documents[i] == documents[j],
            ch.Documents.from_lengths([512] * 8),
        ),
        "prefix": ("a prefix of 1000", lambda b, h, i, j: (j <= i) | (j < 1000), ch.PrefixLM(1000)),
        "global": (
            "first 64 tokens and a window of 257, both directions",
            lambda b, h, i, j: ((i - j).abs() <= 128) | (j < 64) | (i < 64),
            ch.SlidingWindow(before=128, after=128) | ch.FirstKeys(64) | first,
        ),
        "random": (
            "a dense random block mask, 10%",
            lambda b, h, i, j: tenth[i // EDGE, j // EDGE],
            ch.DenseMask(whole),
        ),
    }


def flex(name: str) -> Result:
    """Beside compiled FlexAttention, its block mask made beforehand."""
    what, rule, mask = _rules()[name]
    q, k, v = torch.randn(3, 1, 8, SIZE, 64)
    block_mask = create_block_mask(rule, None, None, SIZE, SIZE, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)
    calls = {
        "flex_attention": lambda: compiled(q, k, v, block_mask=block_mask),
        "clearhead": lambda: ch.attention(q, k, v, mask=mask),
    }
    skipped = ch.plan(q, k, v, mask=mask).skipped
    return faster(f"{what} at (1,8,{SIZE},64), {skipped:.0%} skipped, over compiled FlexAttention", 1, calls, 7)


def flex_with_map() -> Result:
    """FlexAttention's block mask, and clearhead's map of blocks, made at each call."""
    what, rule, _ = _rules()["rule"]
    q, k, v = torch.randn(3, 1, 8, SIZE, 64)
    compiled, made = torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask)
    calls = {
        "flex_attention": lambda: compiled(q, k, v, block_mask=made(rule, None, None, SIZE, SIZE, device="cpu")),
        "clearhead": lambda: ch.attention(q, k, v, mask=ch.MaskFunction(rule)),
    }
    return faster(f"{what}, the map of blocks made in the time, over compiled FlexAttention", 1, calls, 7)


def masked_backward(name: str) -> Result:
    """The backward pass for each allowed pair, over a dense one's."""
    what, _, mask = _rules()[name]
    inputs = leaves(*3 * [(1, 8, SIZE, 64)])
    grad = torch.randn(1, 8, SIZE, 64)
    with torch.enable_grad():
        outputs = {"dense": ch.attention(*inputs), "masked": ch.attention(*inputs, mask=mask)}

    def step(output: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)

    seconds = interleaved({name: step(output) for name, output in outputs.items()}, 5, 1)
    allowed = mask.dense(SIZE, SIZE).float().mean().item()
    ratio = seconds["masked"] / seconds["dense"] / allowed
    return Result(
        f"backward, {what}: for each allowed pair, over dense", ratio, "×", "≤ 1.15", ratio <= 1.15, times(seconds)
    )


CASES: dict[str, Callable[[], Result]] = {
    **{f"flex-{name}": partial(flex, name) for name in NAMES},
    "flex-rule-map": flex_with_map,
    **{f"backward-{name}": partial(masked_backward, name) for name in ("rule", "streaming", "global", "random")},
}
