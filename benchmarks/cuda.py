"""On a CUDA device: each row beside what it is compared to, with the bar that it should reach.

None of these was measured yet: no device was at hand. Without one the table says so, row by row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
from benchmarks.measure import interleaved
from benchmarks.result import Result, times

LONG = (1, 16, 16384, 64)
Calls = dict[str, Callable[[], Tensor]]


@dataclass(frozen=True)
class Row:
    """What is compared, and the bar: the figure should be at least, or at most, this."""

    what: str
    unit: str
    bar: str
    measure: Callable[[], Result]

    def unmeasured(self) -> str:
        return f"{'not yet':>8} measured (bar {self.bar} {self.unit})\n{'':16} {self.what}"


def available() -> bool:
    return torch.cuda.is_available()


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=grad)


def waited(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A call whose end is waited for."""

    def whole() -> Tensor:
        found = call()
        torch.cuda.synchronize()
        return found

    return whole


def trained(attend: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Tensor]:
    """Forward and backward."""
    grad = torch.randn_like(attend(*inputs))

    def both() -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(attend(*inputs), inputs, grad)[0]

    return both


def compared(what: str, unit: str, bar: float, calls: Calls, rounds: int = 21) -> Result:
    """How many times the speed of the best of the others `clearhead` has."""
    # bfloat16 has 8 bits: what each is compared to rounds as often
    others = [name for name in calls if name != "clearhead"]
    for name in others:
        torch.testing.assert_close(calls["clearhead"](), calls[name](), atol=3e-2, rtol=3e-2)
    seconds = interleaved({name: waited(call) for name, call in calls.items()}, rounds, 3)
    speed = min(seconds[name] for name in others) / seconds["clearhead"]
    return Result(what, speed, unit, f"≥ {bar}", speed >= bar, times(seconds))


def plain(what: str, unit: str, bar: float, causal: bool) -> Result:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (drawn(4, 16, 4096, 64) for _ in range(3))

    def backend(which: SDPBackend) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with sdpa_kernel(which):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return call

    kinds = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    calls: Calls = {}
    for kind in kinds:
        try:
            backend(kind)()
        except RuntimeError:
            continue  # this build, or this device, has none
        calls[kind.name.lower()] = backend(kind)
    mask = ch.Causal() if causal else None
    return compared(what, unit, bar, {**calls, "clearhead": lambda: ch.attention(q, k, v, mask=mask)})


def flex(what: str, unit: str, bar: float, mask: ch.extend.Mask, rule: Callable[..., Tensor], train: bool) -> Result:
    """Beside FlexAttention, compiled, with the rule written for it by hand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    inputs = [drawn(*LONG, grad=train) for _ in range(3)]
    blocks = create_block_mask(rule, None, None, LONG[2], LONG[2], device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    sides: dict[str, Callable[..., Tensor]] = {
        "flex": lambda q, k, v: compiled(q, k, v, block_mask=blocks),
        "clearhead": lambda q, k, v: ch.attention(q, k, v, mask=mask),
    }
    calls = {
        name: trained(call, *inputs) if train else (lambda call=call: call(*inputs))  # type: ignore[misc]
        for name, call in sides.items()
    }
    return compared(what, unit, bar, calls)


def window(row: int) -> tuple[ch.extend.Mask, Callable[..., Tensor]]:
    mask = ch.Causal() & ch.SlidingWindow(before=row - 1)
    return mask, lambda b, h, i, j: (j <= i) & (i - j < row)


def documents() -> tuple[ch.extend.Mask, Callable[..., Tensor]]:
    ids = torch.arange(LONG[2], device="cuda") // 2048
    return ch.Causal() & ch.Documents(ids), lambda b, h, i, j: (j <= i) & (ids[i] == ids[j])


def strided() -> tuple[ch.extend.Mask, Callable[..., Tensor]]:
    mask = ch.Causal() & ch.MaskFunction(lambda b, h, i, j: ((i - j) % 64 == 0) | (i - j < 64))
    return mask, lambda b, h, i, j: (j <= i) & (((i - j) % 64 == 0) | (i - j < 64))


def overhead(what: str, unit: str, bar: float) -> Result:
    """Host time, on inputs so small that the device never lags behind; and nothing on the way waits for it."""
    q = drawn(1, 8, 64, 64)
    mask = ch.Causal()
    calls: dict[str, Callable[[], object]] = {
        "sdpa": lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        "clearhead": lambda: ch.attention(q, q, q, mask=mask),
    }
    seconds = {}
    for name, call in calls.items():
        for _ in range(50):
            call()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            start = time.perf_counter()
            for _ in range(500):
                call()
            seconds[name] = (time.perf_counter() - start) / 500
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    over = (seconds["clearhead"] - seconds["sdpa"]) * 1e6
    return Result(what, over, unit, f"≤ {bar:g}", over <= bar, times(seconds))


def additive(what: str, unit: str, bar: float, train: bool) -> Result:
    """Beside torch.compile of the formula, which makes a number for each pair and dimension."""
    q, k, v = (drawn(4, 1024, 256, dtype=torch.float32, grad=True) for _ in range(3))
    weight = ((torch.rand(256, device="cuda") * 2 - 1) / 16).requires_grad_()
    score = ch.Additive.from_weights(None, None, weight)

    @torch.compile(dynamic=False)
    def formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.softmax(torch.tanh(query[:, :, None] + key[:, None]) @ weight, -1) @ value

    sides: dict[str, Callable[..., Tensor]] = {
        "compile": formula,
        "clearhead": lambda query, key, value: ch.attention(query, key, value, score=score),
    }
    inputs = (q, k, v)
    calls: Calls = {
        name: trained(call, *inputs) if train else (lambda call=call: call(*inputs).detach())  # type: ignore[misc]
        for name, call in sides.items()
    }
    return compared(what, unit, bar, calls, 7)


def statistics(what: str, unit: str, bar: float) -> Result:
    q, k, v = (drawn(*LONG) for _ in range(3))
    lazy = ch.weights(q, k, mask=ch.Causal())
    wanted = (
        ch.reductions.Entropy(),
        ch.reductions.TopK(5),
        ch.reductions.Received(),
        ch.reductions.MaxScore(),
        ch.reductions.LogSumExp(),
    )
    calls: Calls = {
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "clearhead": lambda: lazy.reduce(*wanted)[0],
    }
    seconds = interleaved({name: waited(call) for name, call in calls.items()}, 7, 2)
    ratio = seconds["clearhead"] / seconds["sdpa"]
    return Result(what, ratio, unit, f"≤ {bar:g}", ratio <= bar, times(seconds))


def _row(what: str, unit: str, bar: float, measure: Callable[..., Result], *given: object, least: bool = True) -> Row:
    sign = "≥" if least else "≤"
    return Row(what, unit, f"{sign} {bar:g}", lambda: measure(what, unit, bar, *given))


def _masked(name: str, mask: Callable[[], tuple[ch.extend.Mask, Callable[..., Tensor]]], train: bool) -> Row:
    both = ", forward + backward" if train else ""
    what = f"{name} at {LONG}, bfloat16{both}, over compiled FlexAttention"
    return Row(what, "× its speed", "≥ 0.95", lambda: flex(what, "× its speed", 0.95, *mask(), train))


BEST = "× the speed of SDPA's best"
FORMULA = "× the speed of torch.compile"
SHAPE = "(4, 1024, 1024, 256), float32"
CASES: dict[str, Row] = {
    "dense": _row("dense at (4,16,4096,64), bfloat16, over SDPA's kernels", BEST, 0.97, plain, False),
    "causal": _row("causal at (4,16,4096,64), bfloat16, over SDPA's kernels", BEST, 0.97, plain, True),
    "window": _masked("a causal window of 256", lambda: window(256), False),
    "window-training": _masked("a causal window of 256", lambda: window(256), True),
    "documents": _masked("causal documents of 2048", documents, False),
    "documents-training": _masked("causal documents of 2048", documents, True),
    "rule": _masked("a rule, strided", strided, False),
    "rule-training": _masked("a rule, strided", strided, True),
    "overhead": _row("host time of a causal call over SDPA's, and no wait on the way", "µs", 30, overhead, least=False),
    "additive": _row(f"additive at {SHAPE}, forward", FORMULA, 10, additive, False),
    "additive-training": _row(f"additive at {SHAPE}, forward + backward", FORMULA, 12, additive, True),
    "statistics": _row(
        f"entropy, top-5, received, largest score, log-sum-exp, causal at {LONG}, over one forward of FlashAttention",
        "×",
        1.3,
        statistics,
        least=False,
    ),
}
