"""Inputs in which a size is 0: every result against the oracle's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import torch

import clearhead as ch
from clearhead import nn

SIZES = {"batch": 2, "heads": 2, "queries": 3, "keys": 5, "width": 4, "value width": 3}
ENGINES = (None, "native", "sdpa", "tiled", "reference")
MASKS = {
    "no mask": lambda b, q, k: (None, None),
    "causal": lambda b, q, k: (ch.Causal(), ("causal",)),
    "lengths": lambda b, q, k: (ch.Lengths(torch.zeros(b, dtype=torch.long)), ("lengths", np.zeros(b, dtype=int))),
    "lengths of queries": lambda b, q, k: (
        ch.Lengths(torch.zeros(b, q, dtype=torch.long)),
        ("lengths", np.zeros((b, q), dtype=int)),
    ),
    "padding": lambda b, q, k: (ch.Padding(torch.ones(b, k).bool()), ("padding", np.ones((b, k)))),
    "documents": lambda b, q, k: (
        ch.Documents(torch.zeros(b, k, dtype=torch.long)),
        ("documents", np.zeros((b, k))),
    ),
    "window": lambda b, q, k: (ch.SlidingWindow(before=1, after=1), ("window", 1, 1)),
    "prefix": lambda b, q, k: (
        ch.PrefixLM(torch.zeros(b, dtype=torch.long)),
        ("prefix", np.zeros(b, dtype=int)),
    ),
    "dense": lambda b, q, k: (ch.DenseMask(torch.ones(q, k).bool()), ("dense", np.ones((q, k), dtype=bool))),
}


def inputs(sizes: dict[str, int], four: bool = True) -> list[torch.Tensor]:
    heads = [sizes["heads"]] if four else []
    shapes = [("queries", "width"), ("keys", "width"), ("keys", "value width")]
    g = torch.Generator().manual_seed(0)
    return [torch.randn(sizes["batch"], *heads, sizes[n], sizes[e], generator=g) for n, e in shapes]


def differs(got: Any, want: Any, about: str = "") -> str | None:
    got, want = np.asarray(got.detach().double()), np.asarray(want)
    if got.shape != want.shape:
        return f"{about} has shape {got.shape}, not {want.shape}"
    return None if np.allclose(got, want, atol=1e-5, equal_nan=True) else f"{about} has other numbers"


def attention(sizes: dict[str, int], mask: str, engine: str | None, grad: bool) -> str | None:
    tensors = [t.requires_grad_(grad) for t in inputs(sizes)]
    given, rule = MASKS[mask](sizes["batch"], sizes["queries"], sizes["keys"])
    output = ch.attention(*tensors, mask=given, align="lower_right", engine=engine)
    arrays = [t.detach().double().numpy() for t in tensors]
    found = oracle.attend(oracle.Problem(*arrays, mask=rule, align="lower_right"), np.ones(output.shape))
    if grad and not differs(output, found.output):
        got = torch.autograd.grad(output.sum(), tensors, allow_unused=True)
        for name, g, t in zip(("query", "key", "value"), got, tensors, strict=True):
            g = torch.zeros_like(t) if g is None else g
            if words := differs(g, found.gradients[name], f"the gradient to {name}"):
                return words
    return differs(output, found.output, "the output")


def looks(sizes: dict[str, int], mask: str, engine: str) -> str | None:
    query, key, value = inputs(sizes)
    given, rule = MASKS[mask](sizes["batch"], sizes["queries"], sizes["keys"])
    w = ch.weights(query, key, mask=given, align="lower_right", engine=engine)
    arrays = [t.double().numpy() for t in (query, key, value)]
    found = oracle.attend(oracle.Problem(*arrays, mask=rule, align="lower_right"))
    asked: dict[str, tuple[Callable[[], Any], Any]] = {
        "dense": (w.dense, found.weights),
        "[...]": (lambda: w[...], found.weights),
        "entropy": (w.entropy, found.entropy),
        "logsumexp": (w.logsumexp, found.logsumexp),
        "received": (w.received, found.weights.sum(-2)),
        "scores": (w.scores, found.raw),
        "@": (lambda: w @ value, found.output),
        "Output": (lambda: w.reduce(ch.reductions.Output(value)), found.output),
        "pool": (lambda: w.pool(2), oracle.pool(found.weights, 2, "max")),
        "pool mean": (lambda: w.pool(2, "mean"), oracle.pool(found.weights, 2, "mean")),
        "topk": (lambda: w.topk(min(2, max(sizes["keys"], 1)))[0], oracle.largest(found.weights, 2)),
    }
    if not sizes["keys"]:
        del asked["topk"]  # k is from 1 to Lk
    wrong = []
    for name, (ask, want) in asked.items():
        try:
            words = differs(ask(), want, name)
        except Exception as error:
            words = f"{name} is {type(error).__name__}: {str(error).splitlines()[0][:90]}"
        wrong += [words] if words else []
    return "; ".join(wrong) or None


def by_shape(sizes: dict[str, int], call: Callable[..., Any], *shape: str) -> str | None:
    got, want = call(*inputs(sizes)), tuple(sizes[name] for name in shape)
    return None if tuple(got.shape) == want else f"has shape {tuple(got.shape)}, not {want}"


def scores() -> dict[str, Callable[[int], Any]]:
    return {
        "Dot": lambda e: ch.Dot(),
        "softcap": lambda e: ch.Dot(softcap=2.0),
        "Cosine": lambda e: ch.Cosine(),
        "Gaussian": lambda e: ch.Gaussian(),
        "Additive": lambda e: ch.Additive.from_weights(None, None, torch.ones(e)),
        "Bilinear": lambda e: ch.Bilinear.from_weights(torch.ones(e, e)),
        "function": lambda e: lambda q, k: q @ k.mT,
    }


OUT = ("batch", "heads", "queries", "value width")
EMPTIES: dict[str, Callable[[], str | None]] = {}
for _empty in SIZES:
    _sizes = SIZES | {_empty: 0}
    for _mask in MASKS:
        for _engine in ENGINES:
            for _grad in (False, True):
                _name = f"attention: {_empty} of 0, {_mask}, engine {_engine}{', gradients' * _grad}"
                EMPTIES[_name] = lambda s=_sizes, m=_mask, e=_engine, g=_grad: attention(s, m, e, g)
        for _engine in ("native", "tiled", "reference"):
            EMPTIES[f"weights: {_empty} of 0, {_mask}, engine {_engine}"] = lambda s=_sizes, m=_mask, e=_engine: looks(
                s, m, e
            )
    for _score, _make in scores().items():
        if (_score, _empty) == ("Bilinear", "width"):  # there is no such score
            continue
        for _engine in ("tiled", "reference", None):
            EMPTIES[f"{_score}: {_empty} of 0, engine {_engine}"] = lambda s=_sizes, m=_make, e=_engine: by_shape(
                s, lambda q, k, v: ch.attention(q, k, v, score=m(s["width"]), engine=e), *OUT
            )
    if _empty != "heads":
        EMPTIES[f"ALiBi: {_empty} of 0"] = lambda s=_sizes: by_shape(
            s, lambda q, k, v: ch.attention(q, k, v, bias=ch.ALiBi(2), align="lower_right"), *OUT
        )
        EMPTIES[f"RelativeBias: {_empty} of 0"] = lambda s=_sizes: by_shape(
            s, lambda q, k, v: ch.attention(q, k, v, bias=ch.RelativeBias(2), align="lower_right"), *OUT
        )
    EMPTIES[f"sinks: {_empty} of 0"] = lambda s=_sizes: by_shape(
        s, lambda q, k, v: ch.attention(q, k, v, sinks=torch.zeros(q.shape[1])), *OUT
    )
    EMPTIES[f"DenseBias: {_empty} of 0"] = lambda s=_sizes: by_shape(
        s, lambda q, k, v: ch.attention(q, k, v, bias=torch.zeros(s["queries"], s["keys"])), *OUT
    )
    EMPTIES[f"scaled_dot_product_attention: {_empty} of 0"] = lambda s=_sizes: by_shape(
        s, ch.scaled_dot_product_attention, *OUT
    )
    EMPTIES[f"plan: {_empty} of 0"] = lambda s=_sizes: None if repr(ch.plan(*inputs(s))) else "shows nothing"
    EMPTIES[f"repr of the masks: {_empty} of 0"] = lambda s=_sizes: (
        None if all(repr(m(s["batch"], s["queries"], s["keys"])[0]) for m in MASKS.values()) else "shows nothing"
    )
for _empty in ("batch", "queries", "keys"):
    _sizes = SIZES | {_empty: 0, "value width": 4}
    _three = ("batch", "queries", "width")
    EMPTIES[f"nn.MultiHeadAttention: {_empty} of 0"] = lambda s=_sizes: by_shape(
        s, lambda q, k, v: nn.MultiHeadAttention(4, 2).eval()(*inputs(s, False)), "batch", "queries", "width"
    )
    EMPTIES[f"nn.AdditiveAttention: {_empty} of 0"] = lambda s=_sizes: by_shape(
        s, lambda q, k, v: nn.AdditiveAttention(3)(*inputs(s, False)), "batch", "queries", "value width"
    )
    EMPTIES[f"nn.TorchMultiheadAttention: {_empty} of 0"] = lambda s=_sizes: by_shape(
        s,
        lambda q, k, v: nn.TorchMultiheadAttention(4, 2, batch_first=True)(*inputs(s, False))[0],
        *("batch", "queries", "width"),
    )
    EMPTIES[f"nn.DotProductAttention: {_empty} of 0"] = lambda s=_sizes: by_shape(
        s, lambda q, k, v: nn.DotProductAttention()(*inputs(s, False)), "batch", "queries", "value width"
    )
    for _make in (
        lambda: nn.RotaryEmbedding(4),
        lambda: nn.SinusoidalPositionalEncoding(4),
        lambda: nn.LearnedPositionalEncoding(9, 4),
    ):
        EMPTIES[f"nn.{type(_make()).__name__}: {_empty} of 0"] = lambda s=_sizes, m=_make: by_shape(
            s, lambda q, k, v: m().eval()(q), "batch", "heads", "queries", "width"
        )
EMPTIES["masked_softmax: no scores"] = lambda: differs(ch.masked_softmax(torch.zeros(2, 0)), np.zeros((2, 0)))
EMPTIES["masked_softmax: no rows"] = lambda: differs(ch.masked_softmax(torch.zeros(0, 3)), np.zeros((0, 3)))
EMPTIES["masked_softmax: no rows, lengths"] = lambda: differs(
    ch.masked_softmax(torch.zeros(2, 0, 3), [1, 2]), np.zeros((2, 0, 3))
)
EMPTIES["masked_softmax: no scores, lengths"] = lambda: differs(
    ch.masked_softmax(torch.zeros(2, 3, 0), [0, 0]), np.zeros((2, 3, 0))
)
