"""The table: every public entry, how it is called and with what, and which unusual arguments it takes all the same.

A call also uses the object that it builds, since an argument may be refused when it is given or when it is first
needed. `takes` names the kinds of `values` that are right for an argument: "same" gives what the usual argument
gives, "nan" gives NaN in its place, "else" another result, which the tests of that entry check.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from drawn import draw

import clearhead as ch
from bad_input.values import KINDS
from clearhead import nn


def x3(seed: int = 0) -> torch.Tensor:
    return draw(2, 5, 4, seed=seed)


def x4(seed: int = 0) -> torch.Tensor:
    return draw(2, 3, 5, 4, seed=seed)


@dataclass
class Entry:
    group: str
    call: Callable[..., Any]
    usual: dict[str, Any]
    takes: dict[str, dict[str, str]] = field(default_factory=dict)
    together: tuple[str, ...] = ()  # arguments that are replaced at once, too
    takes_together: dict[str, str] = field(default_factory=dict)


QKV = {"query": x3(), "key": x3(1), "value": x3(2)}
QK = {"query": x3(), "key": x3(1)}
PARTIAL = ch.partial(x4(), x4(1), x4(2))
OPTIONS = dict.fromkeys(("score", "mask", "bias", "scale", "sinks", "align"))
NUMBER = dict.fromkeys(("bool",), "else")
NAN = {"NaN tensor": "nan"}
# PyTorch's fused kernel gives 0 for a query that is NaN, or that sees a key that is, and plan() says so
SDPA = {"NaN tensor": "else"}
ABSENT = {"None": "same"}
ONE = {"scalar tensor": "same"}  # one number for every pair
OWN = {"class": "own"}  # an error of the caller's own function is passed on
MATPLOTLIB = dict.fromkeys(KINDS, "own")  # what matplotlib takes, or its own error
WIDER = {"NaN tensor": "nan", "tensor of another size": "else"}  # a value may have any width
WIDE = {"fraction": "else", "huge": "else"}
# where shapes alone are asked for, tensors of any numbers will do
SHAPES = dict.fromkeys(
    ("bool tensor", "integer tensor", "complex tensor", "float8 tensor", "NaN tensor", "tensor of another size"), "same"
)
SHAPES_TOGETHER = {kind: "same" for kind in SHAPES if kind != "tensor of another size"}
UNREAD = {"NaN tensor": "same"}
RAGGED = {"nested tensor": "else"}  # sequences of other lengths
TENSORS = {"NaN tensor": "nan", "meta tensor": "shape", "fake tensor": "shape"}


def options(**more: dict[str, str]) -> dict[str, dict[str, str]]:
    return {
        "score": ABSENT | OWN,
        "mask": ABSENT | ONE,
        "bias": ABSENT | ONE,
        "scale": ABSENT | WIDE | {"negative": "else"},
        "sinks": ABSENT,
        "align": ABSENT | {"negative": "same", "huge": "same"},
        "engine": ABSENT,
        **more,
    }


def look(method: str) -> Callable[..., Any]:
    return lambda **given: getattr(ch.weights(**QK), method)(**given)


OVER_SEVERAL = ("sum", "mean", "amax", "amin")  # dimensions


def score_of(cls: Any) -> Callable[..., Any]:
    return lambda **given: ch.attention(**QKV, score=cls(**given), engine="reference")


def mask_of(make: Any, query: Any = None) -> Callable[..., Any]:
    return lambda **given: ch.attention(**QKV, mask=make(**given), engine="reference")


def bias_of(make: Any) -> Callable[..., Any]:
    return lambda **given: ch.attention(x4(), x4(1), x4(2), bias=make(**given), engine="reference")


def seeded(make: Callable[..., Any]) -> Callable[..., Any]:
    def call(**given: Any) -> Any:
        torch.manual_seed(0)
        return make(**given)

    return call


def module(make: Callable[..., Any], **inputs: Any) -> Callable[..., Any]:
    """Build a module with these arguments, and call it."""
    return seeded(lambda **given: make(**given).eval()(**inputs))


def call_of(build: Callable[[], Any], **always: Any) -> Callable[..., Any]:
    """Call a module."""
    return seeded(lambda **given: build().eval()(**always, **given))


def edited(edit: Callable[..., Any]) -> Callable[..., Any]:
    """The output of a block with an edit made of what is given."""

    def call(**given: Any) -> Any:
        block = Block()
        with ch.edit(block, edit(**given)):
            return block(x3())

    return call


def entered(manager: Any) -> float:
    manager.__enter__()
    return 1.0


def watched(model: Any, **which: Any) -> Any:
    with ch.watch(model, **which) as seen, torch.no_grad():
        model(x3())
    return seen.calls[0].weights.dense()


def switched(record: bool) -> bool:
    module = nn.MultiHeadAttention(4, 2)
    nn.set_recording(module, record)
    return module.record


def reduced(merge: Any = None, **given: Any) -> Any:
    with ch.models.statistics(merge=merge, **given) as seen, torch.no_grad():
        given["model"](x3())
    return seen.calls[0].results[0] if merge is None else merge["Block"][0]


def monitored(model: Any, **given: Any) -> Any:
    with ch.models.monitor(model, **given) as seen:
        model(x3())
    return [row["entropy"] for row in seen.table()]


def letters(texts: list[str], **options: Any) -> dict[str, Any]:
    return {"input_ids": [list(text.encode())[: options.get("max_length")] for text in texts]}


def surveyed(**given: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # a state may be any name
        return torch.tensor([row["queries"] for row in ch.models.survey(**given).table()], dtype=torch.float64)


def numbers_of(name: str) -> Any:
    """The numbers of a method of lazy weights, without the places that `max` and `min` give beside them."""

    def found(**given: Any) -> Any:
        both = look(name)(**given)
        return both if isinstance(both, torch.Tensor) else both[0]

    return found


def drawn(axes: Any) -> torch.Tensor:
    """How large a picture is, or the first of several."""
    one = axes if hasattr(axes, "images") else axes.flat[0]
    found = torch.tensor(one.images[0].get_array().shape)
    one.figure.clear()
    return found


class Block(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


class Letters(torch.nn.Module):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.one_hot(input_ids, 128).float()[:, None]
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=attention_mask[:, None, None].bool())


class CausalLetters(torch.nn.Module):
    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
        x = torch.nn.functional.one_hot(input_ids, 128).float()[:, None]
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0]


def rows_of_ids(examples: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([example["input_ids"] for example in examples])}


def cached(key: Any, value: Any, new_lens: Any) -> Any:
    cache = nn.KeyValueCache()
    cache.append(x4(), x4(1))
    return cache.append(key, value, new_lens)


def filled(change: Callable[[Any], Any], cache: Any = None) -> Any:
    """What is in a cache after a change, and one more position."""
    cache = nn.KeyValueCache() if cache is None else cache
    cache.append(x4(), x4(1))
    change(cache)
    return cache.append(x4(), x4(1))


def prepared(build: Callable[[], Any]) -> Callable[..., Any]:
    """Prepare keys, and call the module with them."""

    def call(**given: Any) -> Any:
        attend = build().eval()
        return attend(x3(), attend.prepare(**given))

    return seeded(call)


class First(torch.nn.Module):
    """The output alone of a module that gives a pair."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **given: Any) -> Any:
        return self.module(**given)[0]


class Attends(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiHeadAttention(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(x, x, x)


def circuits_of(**given: Any) -> Any:
    return ch.models.circuits(inputs=x3(), **given).ov(0, 1).dense()


SELF = Attends().eval()
BLOCK = Block()
with ch.watch(BLOCK, values=True) as RECORDED, torch.no_grad():
    BLOCK(x3())
IDS = torch.tensor([0, 0, 1, 1, 1])
LENS = torch.tensor([2, 5])
E = Entry

EDITED: dict[str, Any] = {"layers": 0, "heads": 0, "queries": 1}
EDITS: dict[str, Any] = {"layers": {"None": "else"}} | {
    name: {"None": "else", "negative": "else"} for name in ("heads", "queries")
}

ENTRIES: dict[str, Entry] = {
    "attention": E(
        "functions",
        ch.attention,
        QKV | OPTIONS | {"dropout_p": 0.0, "engine": None},
        options(query=SDPA, key=SDPA, value=WIDER),
        ("query", "key", "value"),
        TENSORS | RAGGED,
    ),
    "partial": E(
        "functions",
        lambda **given: ch.partial(**given).finish(),
        QKV | {k: v for k, v in OPTIONS.items() if k != "sinks"} | {"engine": None, "keys": (0, 5)},
        options(query=NAN, key=NAN, value=WIDER, keys=ABSENT),
        ("query", "key", "value"),
        TENSORS,
    ),
    "PartialAttention.merge": E(
        "functions", lambda other: PARTIAL.merge(other).finish(), {"other": ch.partial(x4(), x4(1), x4(2))}
    ),
    "PartialAttention.transpose": E(
        "functions", lambda dim0, dim1: PARTIAL.transpose(dim0, dim1).finish(), {"dim0": 0, "dim1": 2}
    ),
    "PartialAttention.finish": E(
        "functions", lambda sinks: PARTIAL.finish(sinks), {"sinks": draw(3)}, {"sinks": {"None": "else"} | NAN}
    ),
    "attention on each engine": E(
        "functions",
        lambda **given: [
            ch.attention(**given, mask=ch.Causal(), engine=e) for e in ("reference", "tiled", "sdpa", "native")
        ],
        QKV,
        {"query": SDPA, "key": SDPA, "value": WIDER},
        ("query", "key", "value"),
        TENSORS | RAGGED,
    ),
    "plan": E(
        "functions",
        lambda **given: torch.tensor(ch.plan(**given).pairs),
        QKV | OPTIONS | {"dropout_p": 0.0, "engine": None},
        options(query=UNREAD, key=UNREAD) | {"score": ABSENT, "value": UNREAD | {"tensor of another size": "same"}},
        ("query", "key", "value"),
        dict.fromkeys(TENSORS, "same") | RAGGED,
    ),
    "explain": E(
        "functions",
        lambda **given: ch.explain(**given)["output"],
        QKV
        | OPTIONS
        | {"at": None, "tokens": list("abcde"), "source_tokens": list("vwxyz"), "title": "A title", "digits": 3},
        options(query=NAN, key=NAN, value=WIDER)
        | {"at": ABSENT | {"negative": "else"}, "tokens": ABSENT, "source_tokens": ABSENT}
        | {"title": ABSENT | {"str": "same"}, "digits": ABSENT},
        ("query", "key", "value"),
        NAN,
    ),
    "diagnose": E(
        "functions",
        lambda **given: torch.tensor(float(len(ch.diagnose(**given).unexamined))),
        QKV | OPTIONS,
        {name: kinds for name, kinds in options().items() if name != "engine"}
        | {"query": UNREAD, "key": UNREAD, "value": UNREAD | {"tensor of another size": "same"}},
        ("query", "key", "value"),
        UNREAD,
    ),
    "masked_softmax": E(
        "functions",
        ch.masked_softmax,
        {"scores": x3(), "valid_lens": torch.tensor([2, 4]), "dim": -1},
        {
            "scores": NAN | {"tensor of another size": "else", "meta tensor": "shape"},
            "valid_lens": {"None": "else", "integer tensor": "else"},
            "dim": {"negative": "same"},
        },
    ),
    "check_shape": E(
        "functions",
        lambda tensor, spec: torch.tensor(sorted(ch.check_shape(tensor, spec).values())),
        {"tensor": x3(), "spec": "B L E"},
        {
            "tensor": dict.fromkeys(
                (
                    "bool tensor",
                    "integer tensor",
                    "complex tensor",
                    "float8 tensor",
                    "sparse tensor",
                    "NaN tensor",
                    "meta tensor",
                    "fake tensor",
                ),
                "same",
            )
            | {"tensor of another size": "else"},
        },
    ),
    "scaled_dot_product_attention": E(
        "functions",
        ch.scaled_dot_product_attention,
        QKV | {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False},
        {
            "query": SDPA,
            "key": SDPA,
            "value": WIDER,
            "attn_mask": ABSENT | ONE,
            "is_causal": {"bool": "else"},
            "enable_gqa": {"bool": "same"},
            "scale": ABSENT | WIDE | {"negative": "else", "scalar tensor": "else"},
        },
        ("query", "key", "value"),
        TENSORS | RAGGED,
    ),
    "weights": E(
        "weights",
        lambda **given: ch.weights(**given).dense(),
        QK | OPTIONS | {"engine": None},
        options(query=NAN, key=NAN),
        ("query", "key"),
        TENSORS | RAGGED,
    ),
    "results.Weights": E(
        "weights",
        lambda **given: [getattr(ch.weights(**given), n)() for n in ("entropy", "received", "dense")],
        QK,
        {"query": NAN, "key": NAN},
        ("query", "key"),
        TENSORS | RAGGED,
    ),
    "Weights[]": E(
        "weights",
        lambda index: ch.weights(**QK)[index],
        {"index": (0, 1)},
        {
            "index": {"None": "else", "negative": "else"},
        },
    ),
    "Weights.scores": E("weights", look("scores"), {"index": (0, 1)}, {"index": {"None": "else", "negative": "else"}}),
    "Weights.dense": E(
        "weights",
        look("dense"),
        {"max_bytes": 1 << 20},
        {
            "max_bytes": dict.fromkeys(("None", "huge", "inf"), "same"),
        },
    ),
    "Weights.entropy": E("weights", look("entropy"), {}),
    "Weights.received": E("weights", look("received"), {}),
    "Weights.topk": E("weights", lambda k: ch.weights(**QK).topk(k)[0], {"k": 3}),
    "Weights.pool": E("weights", look("pool"), {"size": 3, "how": "max"}, {"size": {"huge": "else"}}),
    **{
        f"Weights.{name}": E(
            "weights",
            numbers_of(name),
            {"dim": None, "keepdim": False},
            {
                "dim": ABSENT | {"negative": "else"} | ({"empty list": "same"} if name in OVER_SEVERAL else {}),
                "keepdim": {"bool": "else"},
            },
        )
        for name in (*OVER_SEVERAL, "max", "min", "argmax", "argmin")
    },
    "Weights.reduce": E(
        "weights", lambda reduction: ch.weights(**QK).reduce(reduction), {"reduction": ch.reductions.Entropy()}
    ),
    "Weights.plot": E(
        "weights",
        lambda **given: drawn(ch.weights(**QK).plot(0, **given)),
        {
            "query_labels": list("abcde"),
            "key_labels": list("abcde"),
            "title": "a",
            "cmap": "GnBu",
            "scale": "linear",
            "bar": True,
        },
        {
            "query_labels": ABSENT,
            "key_labels": ABSENT,
            "title": ABSENT | {"str": "same"},
            "scale": WIDE,
            "cmap": MATPLOTLIB,
            "bar": MATPLOTLIB,
        },
    ),
    "Weights.plot()": E(
        "weights",
        lambda head: drawn(ch.weights(x4(), x4(1)).plot(0, head)),
        {"head": 1},
        {"head": {"None": "else", "negative": "else"}},
    ),
    "a mask, plot": E(
        "masks",
        lambda **given: drawn(ch.Causal().plot(**given)),
        {"query": 5, "key": 5, "align": "upper_left", "query_labels": list("abcde"), "key_labels": list("abcde")},
        dict.fromkeys(("query_labels", "key_labels", "key"), ABSENT)
        | {"align": ABSENT | {"negative": "same", "huge": "same"}},
    ),
    "learnt positions, plot": E(
        "nn",
        lambda length: drawn(nn.LearnedPositionalEncoding(9, 4).plot(length)),
        {"length": 5},
        {"length": {"None": "else"}},
    ),
    "sinusoidal positions, plot": E(
        "nn", lambda length: drawn(nn.SinusoidalPositionalEncoding(4).plot(length)), {"length": 5}
    ),
    "rotary positions, plot": E("nn", lambda length: drawn(nn.RotaryEmbedding(4).plot(length)[0]), {"length": 5}),
    "Weights.gradients": E(
        "weights",
        lambda value, grad: ch.weights(**QK).gradients(value, grad).by_key(),
        {"value": x3(2), "grad": x3(3)},
        {"value": NAN, "grad": NAN},
    ),
    "Weights @": E("weights", lambda value: ch.weights(**QK) @ value, {"value": x3(2)}, {"value": WIDER}),
    "Weights.logsumexp": E("weights", lambda **given: ch.weights(**given).logsumexp(), QK, {"query": NAN, "key": NAN}),
    "reductions.Entropy": E("weights", lambda: ch.weights(**QK).reduce(ch.reductions.Entropy()), {}),
    "reductions.Received": E(
        "weights",
        lambda queries: ch.weights(**QK).reduce(ch.reductions.Received(queries)),
        {"queries": slice(1, 3)},
        {"queries": {"None": "else"}},
    ),
    "reductions.LogSumExp": E("weights", lambda: ch.weights(**QK).reduce(ch.reductions.LogSumExp()), {}),
    "reductions.MaxScore": E("weights", lambda: ch.weights(**QK).reduce(ch.reductions.MaxScore()), {}),
    "reductions.SinkShare": E("weights", lambda: ch.weights(**QK).reduce(ch.reductions.SinkShare()), {}),
    "reductions.Mass": E(
        "weights", lambda groups: ch.weights(**QK).reduce(ch.reductions.Mass(groups)), {"groups": [0, 1, 1, 0, 2]}
    ),
    "reductions.TopK": E("weights", lambda k: ch.weights(**QK).reduce(ch.reductions.TopK(k))[0], {"k": 2}),
    "reductions.Pool": E(
        "weights",
        lambda **given: ch.weights(**QK).reduce(ch.reductions.Pool(**given)),
        {"size": 3, "how": "mean"},
        {
            "size": {"huge": "else"},
        },
    ),
    "reductions.MeanDistance": E(
        "weights",
        lambda **given: ch.weights(**QK, **given).reduce(ch.reductions.MeanDistance()),
        {"align": "upper_left"},
        {
            "align": ABSENT | {"negative": "else", "huge": "else"},
        },
    ),
    "reductions.Output": E(
        "weights",
        lambda value: ch.weights(**QK).reduce(ch.reductions.Output(value)),
        {"value": x3(2)},
        {"value": WIDER},
    ),
    "Dot": E(
        "scores",
        score_of(ch.Dot),
        {"scale": None, "softcap": None},
        {
            "scale": ABSENT | WIDE | {"negative": "else"},
            "softcap": ABSENT | WIDE,
        },
    ),
    "attention, sinks": E(
        "functions",
        lambda **given: ch.attention(x4(), x4(1), x4(2), **given),
        {"sinks": draw(3)},
        {"sinks": NAN | {"None": "else"}},
    ),
    "attention, scale": E(
        "functions",
        lambda **given: ch.attention(**QKV, **given),
        {"scale": 0.5},
        {"scale": WIDE | {"negative": "else", "None": "else"}},
    ),
    "attention, align": E(
        "functions",
        lambda **given: ch.attention(**QKV, mask=ch.Causal(), **given),
        {"align": "lower_right"},
        {"align": ABSENT | {"negative": "else", "huge": "else"}},
    ),
    "Bilinear": E("scores", seeded(score_of(ch.Bilinear)), {"query_dim": 4, "key_dim": 4}),
    "Bilinear.from_weights": E("scores", score_of(ch.Bilinear.from_weights), {"weight": draw(4, 4)}, {"weight": NAN}),
    "Additive": E("scores", seeded(score_of(ch.Additive)), {"query_dim": 4, "key_dim": 4, "hidden_dim": 3}),
    "Additive.from_weights": E(
        "scores",
        score_of(ch.Additive.from_weights),
        {"W_q": draw(4, 4), "W_k": draw(4, 4, seed=1), "w_v": draw(4)},
        {"W_q": NAN | {"None": "else"}, "W_k": NAN | {"None": "else"}, "w_v": NAN},
    ),
    "Additive.from_concatenated": E(
        "scores",
        score_of(ch.Additive.from_concatenated),
        {"weight": draw(6, 8), "w_v": draw(6), "order": "key_query", "key_dim": None},
        {"weight": NAN, "w_v": NAN, "key_dim": ABSENT},
    ),
    "Cosine": E("scores", score_of(ch.Cosine), {"temperature": 1.0}, {"temperature": WIDE}),
    "Gaussian": E("scores", score_of(ch.Gaussian), {"bandwidth": 1.0}, {"bandwidth": WIDE}),
    "a function as score": E(
        "scores",
        lambda score: ch.attention(**QKV, score=score),
        {"score": lambda q, k: q @ k.mT},
        {"score": OWN | {"None": "else"}},
    ),
    "calling a score": E(
        "scores", lambda **given: ch.Gaussian()(**given), QK, {"query": NAN, "key": NAN}, ("query", "key"), TENSORS
    ),
    "Lengths": E("masks", mask_of(ch.Lengths), {"valid_lens": LENS}, {"valid_lens": {"integer tensor": "else"}}),
    "Padding": E(
        "masks",
        mask_of(ch.Padding),
        {"keep": torch.ones(2, 5, dtype=torch.bool)},
        {
            "keep": {"bool tensor": "same", "integer tensor": "same"},
        },
    ),
    "Causal": E("masks", mask_of(ch.Causal), {}),
    "SlidingWindow": E(
        "masks",
        mask_of(ch.SlidingWindow),
        {"before": 2, "after": 1},
        {
            "before": {"huge": "else"},
            "after": {"huge": "else"},
        },
    ),
    "FirstKeys": E("masks", mask_of(ch.FirstKeys), {"count": 2}, {"count": {"huge": "else"}}),
    "Documents": E(
        "masks",
        mask_of(ch.Documents),
        {"ids": IDS},
        {
            "ids": {"integer tensor": "else"},
        },
    ),
    "Documents.from_lengths": E("masks", mask_of(ch.Documents.from_lengths), {"lengths": torch.tensor([2, 3])}),
    "Documents.from_position_ids": E(
        "masks",
        mask_of(ch.Documents.from_position_ids),
        {"position_ids": torch.tensor([0, 1, 0, 1, 2])},
        {"position_ids": {"integer tensor": "else"}},
    ),
    "Documents.from_cu_seqlens": E(
        "masks",
        mask_of(ch.Documents.from_cu_seqlens),
        {"cu_q": torch.tensor([0, 2, 5]), "cu_k": torch.tensor([0, 1, 5])},
        {"cu_k": {"None": "else"}},
    ),
    "PrefixLM": E(
        "masks",
        mask_of(ch.PrefixLM),
        {"lengths": LENS},
        {
            "lengths": {"integer tensor": "else"},
        },
    ),
    "DenseMask": E(
        "masks", mask_of(ch.DenseMask), {"keep": torch.ones(5, 5).bool()}, {"keep": {"bool tensor": "same"}}
    ),
    "MaskFunction": E("masks", mask_of(ch.MaskFunction), {"fn": lambda b, h, i, j: j <= i}),
    "& of masks": E(
        "masks", lambda left, right: mask_of(lambda: left & right)(), {"left": ch.Causal(), "right": ch.Causal()}
    ),
    "| of masks": E(
        "masks", lambda left, right: mask_of(lambda: left | right)(), {"left": ch.Causal(), "right": ch.Causal()}
    ),
    "mask.dense": E(
        "masks",
        lambda **given: ch.Causal().dense(**given) * 1.0,
        QK,
        dict.fromkeys(("query", "key"), SHAPES),
        ("query", "key"),
        SHAPES_TOGETHER,
    ),
    "ALiBi": E("biases", bias_of(ch.ALiBi), {"num_heads": 3}),
    "BiasFunction": E("biases", bias_of(ch.BiasFunction), {"fn": lambda b, h, i, j: (j - i) / 2}),
    "RelativeBias": E(
        "biases",
        seeded(bias_of(ch.RelativeBias)),
        {"num_heads": 3, "num_buckets": 8, "max_distance": 20, "bidirectional": True},
        {"max_distance": {"huge": "else"}, "bidirectional": {"bool": "same"}},
    ),
    "DenseBias": E(
        "biases", bias_of(ch.DenseBias), {"tensor": draw(5, 5)}, {"tensor": NAN | {"scalar tensor": "else"}}
    ),
    "+ of biases": E(
        "biases", lambda left, right: bias_of(lambda: left + right)(), {"left": ch.ALiBi(3), "right": ch.ALiBi(3)}
    ),
    "calling a bias": E(
        "biases",
        lambda **given: ch.ALiBi(3)(**given),
        {"query": x4(), "key": x4(1)},
        dict.fromkeys(("query", "key"), SHAPES),
        ("query", "key"),
        SHAPES_TOGETHER,
    ),
    "nn.MultiHeadAttention": E(
        "nn",
        module(nn.MultiHeadAttention, query=draw(2, 5, 8), key=draw(2, 5, 8), value=draw(2, 5, 8)),
        {
            "embed_dim": 8,
            "num_heads": 2,
            "dropout": 0.0,
            "bias": True,
            "head_dim": None,
            "num_kv_heads": None,
            "kdim": None,
            "vdim": None,
            "score": None,
            "rotary": None,
            "query_norm": None,
            "key_norm": None,
            "scale": None,
            "temperature": None,
            "sinks": False,
            "score_bias": None,
            "gate": None,
        },
        dict.fromkeys(("head_dim", "num_kv_heads", "kdim", "vdim", "score", "rotary"), ABSENT)
        | dict.fromkeys(("query_norm", "key_norm", "score_bias", "gate"), ABSENT)
        | {"scale": ABSENT | WIDE | {"negative": "else", "scalar tensor": "else"}}
        | {
            "temperature": ABSENT | WIDE | {"scalar tensor": "else"},
            "sinks": {"bool": "else"},
            "bias": {"bool": "same"},
        },
    ),
    "nn.MultiHeadAttention()": E(
        "nn",
        call_of(lambda: nn.MultiHeadAttention(8, 2)),
        {
            "query": draw(2, 5, 8),
            "key": draw(2, 5, 8),
            "value": draw(2, 5, 8),
            "mask": None,
            "valid_lens": None,
            "bias": None,
            "cache": None,
            "new_lens": None,
        },
        {
            "new_lens": ABSENT,
            "query": SDPA,
            "key": SDPA,
            "value": NAN,
            "mask": ABSENT,
            "valid_lens": ABSENT,
            "bias": ABSENT | ONE,
            "cache": ABSENT,
        },
        ("query", "key", "value"),
        NAN,
    ),
    "nn.MultiHeadAttention.prepare": E(
        "nn",
        prepared(lambda: nn.MultiHeadAttention(4, 2)),
        {"key": x3(1), "value": x3(2)},
        {"key": SDPA, "value": NAN},
        ("key", "value"),
        NAN,
    ),
    "nn.MultiHeadAttention.from_torch": E(
        "nn",
        seeded(lambda module: nn.MultiHeadAttention.from_torch(module)(x3(), x3(), x3())),
        {"module": torch.nn.MultiheadAttention(4, 2, batch_first=True).eval()},
    ),
    "nn.MultiHeadAttention.to_torch": E(
        "nn",
        seeded(lambda **given: nn.MultiHeadAttention(8, 2, **given).to_torch().in_proj_weight),
        {"score": None},
        {"score": ABSENT},
    ),
    "nn.AdditiveAttention": E(
        "nn",
        module(nn.AdditiveAttention, **QKV),
        {"hidden_dim": 3, "dropout": 0.0},
    ),
    "nn.AdditiveAttention.prepare": E(
        "nn",
        prepared(lambda: nn.AdditiveAttention(3)),
        {"key": x3(1), "value": x3(2)},
        {"key": NAN | {"tensor of another size": "else"}, "value": WIDER},
        ("key", "value"),
        NAN,
    ),
    "nn.AdditiveAttention()": E(
        "nn",
        call_of(lambda: nn.AdditiveAttention(3)),
        QKV | {"valid_lens": None, "mask": None},
        {
            "query": NAN | {"tensor of another size": "else"},
            "key": NAN | {"tensor of another size": "else"},
            "value": WIDER,
            "valid_lens": ABSENT,
            "mask": ABSENT | ONE,
        },
        ("query", "key", "value"),
        NAN | RAGGED,
    ),
    "nn.DotProductAttention": E("nn", module(nn.DotProductAttention, **QKV), {"dropout": 0.0}),
    "nn.DotProductAttention()": E(
        "nn",
        call_of(nn.DotProductAttention),
        QKV | {"valid_lens": None, "mask": None},
        {"query": SDPA, "key": SDPA, "value": WIDER, "valid_lens": ABSENT, "mask": ABSENT | ONE},
        ("query", "key", "value"),
        TENSORS | RAGGED,
    ),
    "nn.KeyValueCache": E(
        "nn",
        lambda capacity, window, first: filled(
            lambda cache: None, nn.KeyValueCache(capacity, window=window, first=first)
        )[0],  # the keys
        {"capacity": 16, "window": None, "first": 0},
        {"capacity": {"None": "else"}, "window": ABSENT},  # without either it grows
    ),
    "nn.KeyValueCache.of": E(
        "nn",
        lambda layer: filled(lambda cache: None, nn.KeyValueCache(16).of(layer)),
        {"layer": 0},
        {"layer": dict.fromkeys(("str", "negative", "huge"), "same")},  # a name is any whole number or text
    ),
    "nn.KeyValueCache.append": E(
        "nn",
        cached,
        {"key": x4(2), "value": x4(3), "new_lens": None},
        {"key": {"NaN tensor": "else"}, "value": {"NaN tensor": "else"}, "new_lens": ABSENT},
    ),
    "nn.KeyValueCache.reorder": E(
        "nn",
        lambda indices: filled(lambda cache: cache.reorder(indices)),
        {"indices": torch.tensor([1, 0])},
        {"indices": {"integer tensor": "else"}},
    ),
    "nn.KeyValueCache.crop": E("nn", lambda length: filled(lambda cache: cache.crop(length)), {"length": 3}),
    "nn.KeyValueCache.reset": E("nn", lambda: filled(lambda cache: cache.reset()), {}),
    "nn.LearnedPositionalEncoding": E(
        "nn",
        module(nn.LearnedPositionalEncoding, x=x3()),
        {"max_len": 7, "embed_dim": 4, "dropout": 0.0},
    ),
    "nn.LearnedPositionalEncoding()": E(
        "nn",
        call_of(lambda: nn.LearnedPositionalEncoding(9, 4)),
        {"x": x3(), "offset": 1},
        {"x": NAN | RAGGED},
    ),
    "nn.RotaryEmbedding": E(
        "nn",
        module(nn.RotaryEmbedding, x=x3()),
        {"dim": 4, "base": 10000.0, "interleaved": False},
        {
            "base": WIDE,
            "interleaved": {"bool": "else"},
        },
    ),
    "nn.RotaryScaling": E(
        "nn",
        lambda **given: nn.RotaryEmbedding(4, scaling=nn.RotaryScaling.yarn(**given))(x3()),
        {"factor": 4.0, "original_length": 16, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None},
        dict.fromkeys(("factor", "beta_fast"), WIDE)
        | {"beta_slow": {"fraction": "else"}, "attention_factor": ABSENT | WIDE},
    ),
    "nn.RotaryScaling.linear": E(
        "nn",
        lambda factor: nn.RotaryEmbedding(4, scaling=nn.RotaryScaling.linear(factor))(x3()),
        {"factor": 4.0},
        {"factor": WIDE},
    ),
    "nn.RotaryScaling.dynamic": E(
        "nn",
        lambda **given: nn.RotaryEmbedding(4, scaling=nn.RotaryScaling.dynamic(**given))(x3()),
        {"factor": 4.0, "original_length": 3},
        {"factor": WIDE},
    ),
    "nn.RotaryScaling.llama3": E(
        "nn",
        lambda **given: nn.RotaryEmbedding(4, scaling=nn.RotaryScaling.llama3(**given))(x3()),
        {"factor": 4.0, "original_length": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        dict.fromkeys(("factor", "high_freq_factor"), WIDE) | {"low_freq_factor": {"fraction": "else"}},
    ),
    "nn.RotaryEmbedding()": E(
        "nn", call_of(lambda: nn.RotaryEmbedding(4)), {"x": x3(), "offset": 1}, {"x": WIDER | RAGGED}
    ),
    "nn.SinusoidalPositionalEncoding": E(
        "nn",
        module(nn.SinusoidalPositionalEncoding, x=x3()),
        {"embed_dim": 4, "dropout": 0.0},
    ),
    "nn.SinusoidalPositionalEncoding()": E(
        "nn",
        call_of(lambda: nn.SinusoidalPositionalEncoding(4)),
        {"x": x3(), "offset": 1},
        {"x": NAN | RAGGED},
    ),
    "nn.set_recording": E("nn", switched, {"record": True}, {"record": {"bool": "same"}}),
    "nn.TorchMultiheadAttention": E(
        "nn",
        module(lambda **given: First(nn.TorchMultiheadAttention(**given)), query=x3(), key=x3(1), value=x3(2)),
        {
            "embed_dim": 4,
            "num_heads": 2,
            "dropout": 0.0,
            "bias": True,
            "add_bias_kv": False,
            "add_zero_attn": False,
            "kdim": None,
            "vdim": None,
            "batch_first": True,
        },
        {"bias": {"bool": "same"}, "kdim": ABSENT, "vdim": ABSENT, "batch_first": {"bool": "same"}},
    ),
    "nn.TorchMultiheadAttention()": E(
        "nn",
        call_of(lambda: First(nn.TorchMultiheadAttention(4, 2, batch_first=True))),
        QKV
        | {
            "key_padding_mask": None,
            "need_weights": True,
            "attn_mask": None,
            "average_attn_weights": True,
            "is_causal": False,
        },
        {
            "query": SDPA,
            "key": SDPA,
            "value": NAN,
            "key_padding_mask": ABSENT,
            "attn_mask": ABSENT,
            "need_weights": {"bool": "same"},
            "average_attn_weights": {"bool": "same"},
        },
        ("query", "key", "value"),
        NAN | RAGGED,
    ),
    "nn.TorchMultiheadAttention.from_torch": E(
        "nn",
        seeded(lambda module: nn.TorchMultiheadAttention.from_torch(module)(x3(), x3(), x3())[0]),
        {"module": torch.nn.MultiheadAttention(4, 2, batch_first=True).eval()},
    ),
    "watch": E(
        "models",
        watched,
        {"model": Block(), "every": 1, "layers": 0, "values": False, "gradients": False},
        {"layers": {"None": "same"}, "values": {"bool": "same"}, "gradients": {"bool": "same"}},
    ),
    "models.statistics": E(
        "models",
        reduced,
        {
            "model": Block(),
            "reductions": [ch.reductions.Entropy()],
            "every": 1,
            "layers": 0,
            "heads": 0,
            "merge": ch.models.Means(),
        },
        {
            "layers": {"None": "same"},
            "heads": {"None": "same", "negative": "same", "huge": "else"},
            "merge": {"None": "else"},
        },
    ),
    "models.survey": E(
        "models",
        surveyed,
        {
            "model": Letters().eval(),
            "texts": ["abc", "a text"],
            "tokenizer": letters,
            "keep": "first",
            "state": None,
            "batch": 64,
            "max_length": 5,
            "rank": (0, 1),
            "wait": 1.0,
        },
        {
            "keep": {"None": "else"},
            "texts": {"string array": "else"},
            "state": {"None": "same", "str": "same"},
            "max_length": {"None": "else"},
            "rank": {"None": "same"},
            "wait": {"fraction": "same", "huge": "same", "negative": "same"},
        },
    ),
    "models.monitor": E(
        "models",
        monitored,
        {"model": Block(), "every": 1, "callback": None, "layers": 0},
        {"callback": {"None": "same", "class": "own"}, "layers": {"None": "same"}},
    ),
    "models.lazy_attentions": E("models", lambda model: entered(ch.models.lazy_attentions(model)), {"model": None}),
    "edit": E("models", lambda model: entered(ch.edit(model, ch.edits.ScaleHeads())), {"model": Block()}),
    "edits.Edit": E("models", edited(ch.edits.Edit), EDITED, EDITS),
    "edits.Knockout": E(
        "models",
        edited(ch.edits.Knockout),
        EDITED | {"keys": 1, "after": False},
        EDITS | {"keys": {"None": "else", "negative": "else"}, "after": {"bool": "else"}},
    ),
    "edits.ScaleHeads": E(
        "models",
        edited(ch.edits.ScaleHeads),
        EDITED | {"factor": 0.5},
        EDITS | {"factor": {"negative": "else", "fraction": "else", "huge": "else"}},
    ),
    "edits.MapWeights": E(
        "models", edited(ch.edits.MapWeights), EDITED | {"function": torch.sqrt}, EDITS | {"function": OWN}
    ),
    "edits.ForceMask": E(
        "models",
        edited(ch.edits.ForceMask),
        EDITED | {"mask": torch.ones(5, 5, dtype=torch.bool)},
        EDITS | {"mask": {"bool tensor": "same"}},
    ),
    "edits.AddBias": E(
        "models",
        edited(ch.edits.AddBias),
        EDITED | {"bias": torch.zeros(5, 5)},
        EDITS | {"bias": {"scalar tensor": "else", "NaN tensor": "nan", "tensor of another size": "else"}},
    ),
    "edits.Patch": E(
        "models",
        edited(ch.edits.Patch),
        EDITED | {"source": x4()[:, :1], "part": "value", "keys": 1, "positions": None},
        EDITS
        | {
            "source": {"NaN tensor": "nan"},
            "keys": {"None": "else", "negative": "else"},
            "positions": ABSENT,
        },
    ),
    "edits.Freeze": E("models", edited(ch.edits.Freeze), EDITED | {"source": torch.eye(5).expand(2, 1, 5, 5)}, EDITS),
    "edits.Ablate": E(
        "models",
        edited(ch.edits.Ablate),
        EDITED | {"kind": "mean", "over": RECORDED, "seed": 0},
        EDITS,
    ),
    "models.circuits": E("models", circuits_of, {"model": SELF}),
    "models.logit_attribution": E(
        "models",
        lambda **given: ch.models.logit_attribution(inputs=x3(), **given).logit,
        {"model": SELF, "token": 1, "against": 2, "position": 0},
        {
            "token": {"integer tensor": "else"},  # of two dimensions: several answers
            "against": {"None": "else"},
            "position": {"negative": "else", "integer tensor": "else"},
        },
    ),
    "audit": E(
        "models",
        lambda **given: ch.audit(**given).ok,
        {
            "model": Block(),
            "batch": x3(),
            "mask": None,
            "padding": None,
            "level": "layers",
            "inputs": None,
            "output": None,
            "seed": 0,
            "expect": (),
        },
        {
            "batch": {
                "NaN tensor": "else",
                "tensor of another size": "else",
                "tensor of more dimensions": "else",
                "float8 tensor": "own",  # the model cannot compute with it
            },
            "mask": ABSENT,
            "padding": ABSENT,
            "inputs": ABSENT,
            "output": ABSENT | OWN,
            "expect": {"empty list": "same"},
        },
    ),
    "models.audit_collator": E(
        "models",
        lambda **given: ch.models.audit_collator(**given).ok,
        {
            "model": CausalLetters(),
            "collator": rows_of_ids,
            "level": "outputs",
            "seed": 0,
            "examples": [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 10]}],
        },
        {"collator": OWN},
    ),
    "models.make_audit_callback": E(
        "models",
        lambda **given: ch.models.make_audit_callback(**given) is not None,
        {"mask_of_batch": lambda batch: None},
        {"mask_of_batch": {"class": "same"}},
    ),
    "models.match_tokens": E("models", ch.models.match_tokens, {"tokens": ["a", "b"], "other_tokens": ["b", "a"]}),
    "models.run_on_clearhead": E(
        "models", lambda **given: ch.models.run_on_clearhead(**given), {"model": None, "layout": None}
    ),
}

# Public names that are no entries, and why.
ANY_ANSWER = "it takes any answer, and a wrong one raises a WrongAnswer: tests/learning/test_checks.py"
NOT_CALLED = {
    **dict.fromkeys(("exercises.WrongAnswer", "exercises.close", "exercises.tried", "exercises.true"), ANY_ANSWER),
    "show_versions": "takes nothing: tests/test_versions.py",
    "ClearheadError": "an error", "ShapeError": "an error", "UnsupportedError": "an error",
    "extend.Score": "abstract", "extend.Mask": "abstract", "extend.Bias": "abstract",
    "extend.Pairwise": "what lower() gives, checked there", "extend.Spans": "what lower() gives",
    "extend.Added": "what lower() gives",
    "extend.Sizes": "what lower() is given", "extend.Problem": "what an engine is given",
    "extend.Summary": "what an engine is given", "extend.Found": "what an engine gives",
    "extend.Partial": "what an engine gives", "extend.Cost": "what an engine gives",
    "extend.Engine": "abstract", "extend.Reduction": "abstract", "extend.query_offset": "takes Sizes",
    "models.load": "takes a folder: tests/test_cli.py", "models.bundled": "takes nothing",
    "results.Plan": "what plan() gives", "results.PartialAttention": "what partial() gives",
    "explanation.Explanation": "what explain() gives", "explanation.Explanation.to_dict": "takes nothing",
    "explanation.Frame": "what frame() gives",
    "explanation.Motion": "takes no tensors: tests/explanation/test_motion.py",
    "explanation.Picture": "takes no tensors: tests/explanation/test_motion.py",
    "results.WeightGradients": "what Weights.gradients() gives",
    "models.AttentionCall": "what watch() gives", "models.Recording": "what watch() gives",
    "models.ReducedCall": "what statistics() gives", "models.Statistics": "what statistics() gives",
    "models.Means": "takes nothing",
    "models.Survey": "what survey() gives",
    "models.Framed": "what a recording gives",
    "models.Monitor": "what monitor() gives", "models.Generation": "what a recording gives",
    "models.LazyAttention": "what lazy_attentions() gives",
    "models.Circuits": "what circuits() gives", "models.Projections": "what Circuits.projections() gives",
    "models.LowRank": "what Circuits.qk() gives", "models.SVD": "what LowRank.svd() gives",
    "models.LogitAttribution": "what logit_attribution() gives",
    "models.AttributedCall": "what logit_attribution() gives", "models.Sweep": "what sweep() gives",
    "models.sweep": "takes functions: tests/models/test_sweep.py",
    "models.attribution_patching": "takes functions: tests/models/test_attribution_patching.py",
    "models.kl": "gives a function of outputs: tests/models/test_sweep.py",
    "models.logit_difference": "gives a function of outputs: tests/models/test_sweep.py",
    "models.next_token_loss": "gives a function of outputs: tests/models/test_sweep.py",
    "explanation.Diagnosis": "what diagnose() gives", "explanation.Finding": "what diagnose() gives",
    "explanation.Diagnosis.to_dict": "takes nothing", "explanation.Finding.to_dict": "takes nothing",
    "models.AuditReport": "what audit() gives", "models.AuditTest": "what audit() gives",
    "models.AuditFinding": "what audit() gives", "models.AuditReport.to_dict": "takes nothing",
    "models.make_bug_script": "takes a report of audit()", "assert_attends": "audit()",
    "models.Differences": "what seen.compare() gives", "models.CallDifference": "what seen.compare() gives",
    "results.WeightDifference": "what seen.compare() gives", "models.Distinctive": "what seen.distinctive() gives",
    "models.Table": "what seen.table() gives", "models.Table.to_pandas": "tests/models/test_heads.py",
    "models.load_recording": "takes a path: tests/models/test_stored.py",
    "nn.PreparedKeys": "what prepare() gives",
    "Weights.shape": "an attribute", "Weights.dtype": "an attribute", "Weights.problem": "an attribute",
    "Weights.ndim": "an attribute", "Weights.device": "an attribute", "Weights.dim": "takes nothing",
    "Weights.numel": "takes nothing", "Weights.numpy": "takes nothing", "Weights.tolist": "takes nothing",
    "Weights.item": "takes nothing", "Weights.size": "what the shape gives for a dimension",
}  # fmt: skip


def public():
    """Every public name: those of clearhead, of clearhead.nn, of Weights, and what classes are built by."""
    spaces = ("edits", "exercises", "explanation", "extend", "models", "nn", "reductions", "results")
    owners = [(ch, ""), (ch.results.Weights, "Weights."), *((getattr(ch, name), f"{name}.") for name in spaces)]
    for owner, prefix in owners:
        for name in dir(owner):
            value = getattr(owner, name)
            of_ours = callable(value) and str(getattr(value, "__module__", "")).startswith("clearhead")
            if owner not in (ch, ch.results.Weights) and name in ch.__all__:
                continue  # it stands at the top, too
            if not name.startswith("_") and (of_ours or owner is ch.results.Weights):
                yield prefix + name
            if isinstance(value, type) and of_ours:
                yield from (f"{prefix}{name}.{n}" for n in vars(value) if n.startswith(("from_", "to_")))
