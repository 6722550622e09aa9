"""The page's own formulas, run by Node.js on what Python has written, are those of float64 in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eager import pooled, scores_of, statistics_of
from node import run_on_page
from rendered import render

import clearhead as ch
from clearhead.base.shapes import Sizes
from clearhead.problem.words import Words
from clearhead.report import Layer
from clearhead.report.from_call import layer_from_call

LQ, LK, HEADS, WIDE = 7, 11, 4, 6


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


class Manhattan(ch.extend.Score):
    """A score that has `tile()` alone."""

    def tile(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return -(query.unsqueeze(-2) - key.unsqueeze(-3)).abs().sum(-1)


class ByDistance(ch.extend.Bias):
    """One number a distance and a head."""

    def lower(self, sizes: Sizes) -> ch.extend.Added:
        return ch.extend.Added(relative=normal(1, sizes.heads, sizes.queries + sizes.keys - 1, seed=5))


class ByKey(ch.extend.Bias):
    """One number a key, the same for all heads; one of them −∞."""

    def lower(self, sizes: Sizes) -> ch.extend.Added:
        numbers = normal(1, 1, 1, sizes.keys, seed=6)
        numbers[..., 2] = -torch.inf
        return ch.extend.Added(dense=numbers)


def weighted(count: int) -> ch.extend.Score:
    """An additive score of projected sides."""
    return ch.Additive.from_weights(None, None, normal(count, seed=7))


def holes(heads: int = 1) -> torch.Tensor:
    keep = normal(1, heads, LQ, LK, seed=8) > -0.4
    keep[:, :, 3] = False  # a query that sees nothing
    return keep


FAR = ch.MaskFunction(lambda b, h, q, k: (k - q) % 3 != 1)  # a residual that is asked for in parts
BY_FUNCTION = ch.BiasFunction(lambda b, h, q, k: torch.sin(q * 1.0 + h * 2) * k / 5)

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": ch.Causal(), "align": "lower_right"},
    "upper left": {"mask": ch.Causal(), "align": "upper_left"},
    "window": {"mask": ch.Causal() & ch.SlidingWindow(before=2), "align": 3},
    "gaps": {"mask": ch.SlidingWindow(before=1, after=1) | ch.DenseMask(torch.arange(LK) == 0), "align": 2},
    "holes": {"mask": ch.DenseMask(holes())},
    "holes by head": {"mask": ch.DenseMask(holes(HEADS))},
    "a residual": {"mask": FAR},
    "softcap": {"score": ch.Dot(softcap=1.5)},
    "additive": {"score": weighted(WIDE)},
    "additive, softcap, causal": {
        "score": ch.Additive.from_weights(None, None, normal(WIDE, seed=9), softcap=0.7),
        "mask": ch.Causal(), "align": "lower_right",
    },
    "gaussian": {"score": ch.Gaussian(0.8)},
    "gaussian, learnt": {"score": ch.Gaussian(torch.nn.Parameter(torch.tensor(1.2)))},
    "given": {"score": Manhattan()},
    "given, softcap, holes": {"score": Manhattan(softcap=2.0), "mask": ch.DenseMask(holes())},
    "relative bias": {"bias": ByDistance()},
    "alibi": {"bias": ch.ALiBi(HEADS), "mask": ch.Causal(), "align": "lower_right"},
    "bias of keys": {"bias": ByKey()},
    "bias of heads": {"bias": ch.DenseBias(normal(1, HEADS, 1, 1, seed=14)), "sinks": normal(HEADS, seed=12)},
    "dense bias": {"bias": normal(1, HEADS, LQ, LK, seed=10)},
    "dense bias with −∞": {"bias": torch.where(holes(HEADS), 0.3, -torch.inf)},
    "bias by a function": {"bias": BY_FUNCTION},
    "all biases": {"bias": ByDistance() + ByKey() + ch.DenseBias(normal(LQ, LK, seed=11)) + BY_FUNCTION},
    "sinks": {"sinks": normal(HEADS, seed=12)},
    "sinks, causal, holes": {
        "sinks": 2 * normal(HEADS, seed=13), "mask": ch.Causal() & FAR, "align": "lower_right",
    },
}  # fmt: skip


class Block(torch.nn.Module):
    def forward(self, query: Any, key: Any, **options: Any) -> Any:
        return ch.attention(query, key, key, **options)


def layer_of(options: dict[str, Any], key_heads: int = HEADS, error: float = 0, **watching: Any) -> tuple[Layer, Any]:
    """A call as a layer, and the call."""
    block = Block()
    with torch.no_grad(), ch.watch(block, **watching) as seen:
        block(normal(1, HEADS, LQ, WIDE, seed=1), normal(1, key_heads, LK, WIDE, seed=2), **options)
    (layer,) = seen.layers(error=error)
    return layer, seen.calls[0]


def eager(call: Any) -> tuple[Any, Any]:
    """Scores with their bias, and which pairs are allowed, (H, Lq, Lk), from what the call was given."""
    problem = call.problem
    sizes, every = problem.sizes, slice(None)
    scores = call.weights.scores((0,)).double().numpy()
    keep = np.ones(scores.shape, dtype=bool)
    if call.mask is not None:
        keep &= call.mask._compute_matrix(sizes)[0].expand(scores.shape).numpy()
    if problem.bias is not None:
        scores = scores + problem.bias.tile(every, every, every, every, sizes)[0].double().numpy()
        keep &= scores != -np.inf
    return scores, keep


def listed(array: Any) -> list[Any]:
    return [float(x) if np.isfinite(x) else str(float(x)) for x in np.asarray(array, dtype=np.float64).ravel()]


def wanted_of(name: str, layer: Layer, scores: Any, keep: Any, fine: float) -> dict[str, Any]:
    """What the page must give of a layer; its sums over features are of float64, as NumPy's."""
    found = statistics_of(scores, keep, layer.sinks, layer.position if layer.kind == "self" else None)
    heads = []
    for head in range(layer.heads):
        each = {key: None if of is None else listed(of[head]) for key, of in found.items()}
        each |= {"allowed": listed(keep[head]), "scores": listed(np.where(keep[head], scores[head], 0))}
        each |= {"pool": listed(pooled(found["weights"][head], keep[head], 2, 3)), "number": head}
        each["look"] = look_entropy(found["weights"][head][-1])
        heads.append(each)
    sizes = [*layer.shape, None if layer.scores is not None else layer.phi]
    return {"name": name, "fine": fine, "sizes": sizes, "heads": heads}


def look_entropy(row: Any) -> list[Any]:
    """The entropy of a row of weights divided by their sum."""
    shares = row / row.sum() if row.sum() else row
    return listed(-(shares * np.log(np.where(shares > 0, shares, 1.0))).sum())


@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_every_form_of_a_call(key_heads: int, tmp_path: Path) -> None:
    layers, wanted = [], []
    for name, options in CASES.items():
        layer, call = layer_of(options, key_heads)
        scores, keep = eager(call)
        np.testing.assert_array_equal(np.stack([layer.allowed(h, 0, LQ) for h in range(HEADS)]), keep, err_msg=name)
        own = scores_of(layer)  # of float64 where the call's are of float32
        if layer.bias is not None:
            own = own + np.stack([layer.bias.rows(h, 0, LQ, layer.shape) for h in range(HEADS)])
        np.testing.assert_allclose(own[keep], scores[keep], rtol=1e-5, atol=2e-6, err_msg=name)
        layers.append(layer)
        wanted.append(wanted_of(name, layer, own, keep, 2e-6))
    run_on_page(Path(__file__).with_name("formulas.test.js"), render(layers, "All forms"), wanted, tmp_path)


class Padded(torch.nn.Module):
    """Direct attention over a batch whose padding the caller names."""

    def forward(self, x: torch.Tensor, mask: Any, bias: Any) -> Any:
        return ch.attention(x, x, x, mask=mask, bias=bias)


def sides(kind: str) -> torch.Tensor:
    """Which of 20 positions are words: the last, the first, or those between."""
    words = torch.ones(2, 20, dtype=torch.bool)
    words[1] = {"left": torch.arange(20) >= 6, "right": torch.arange(20) < 13, "between": torch.arange(20) % 3 > 0}[
        kind
    ]
    return words


PADDED = {
    "a bias by distance": lambda words: (ch.Padding(words), ch.ALiBi(HEADS)),
    "causal, a bias by distance": lambda words: (ch.Padding(words) & ch.Causal(), ch.ALiBi(HEADS)),
    "a dense bias": lambda words: (ch.Padding(words), ch.DenseBias(normal(1, HEADS, 20, 20, seed=20))),
    "holes": lambda words: (ch.Padding(words) & ch.DenseMask(normal(20, 20, seed=21) > -1), None),
    "words that see padding": lambda words: (None, ch.ALiBi(HEADS)),
}


@pytest.mark.parametrize("kind", ["left", "right", "between"])
def test_padding_is_left_out(kind: str, tmp_path: Path) -> None:
    words, layers, wanted = sides(kind), [], []
    real = words[1].numpy()
    for name, made in PADDED.items():
        model = Padded()
        with torch.no_grad(), ch.watch(model, padding=words) as seen:
            model(normal(2, HEADS, 20, WIDE, seed=3), *made(words))
        (layer,) = seen.layers([f"t{i}" for i in range(20)], sequence=1, error=0)
        call, sizes, every = seen.calls[0], seen.calls[0].problem.sizes, slice(None)
        assert layer.query_tokens == layer.key_tokens == [f"t{i}" for i in np.flatnonzero(real)]
        keep = np.ones((HEADS, 20, 20), dtype=bool)
        if call.mask is not None:
            keep &= call.mask._compute_matrix(sizes).expand(2, HEADS, 20, 20)[1].numpy()
        scores = call.weights.scores((1,)).double().numpy()
        if call.problem.bias is not None:
            bias = call.problem.bias.tile(every, every, every, every, sizes).expand(2, HEADS, 20, 20)
            scores = scores + bias[1].double().numpy()
        whole = statistics_of(scores, keep, None, 0)
        cut = keep[:, real][:, :, real]
        found = wanted_of(name, layer, scores[:, real][:, :, real], cut, 1e-5)
        for head in range(HEADS):  # of whole rows, in positions of the whole text
            each = found["heads"][head]
            row = {n: whole[n][head][real] for n in ("logsumexp", "entropy", "distance")}
            row["received"] = whole["received"][head][real] - whole_of_padding(scores, keep, head, real)
            weights = whole["weights"][head][real][:, real]
            own = keep[head][real].astype(float)  # padding that a word sees counts in what uniform attention would give
            row |= {"counts": own.sum(1), "expected": (own / np.maximum(own.sum(1, keepdims=True), 1)).sum(0)[real]}
            each |= {n: listed(of) for n, of in row.items()}
            each |= {"weights": listed(weights), "pool": listed(pooled(weights, cut[head], 2, 3))}
            each["look"] = look_entropy(weights[-1])
        layers.append(layer)
        wanted.append(found)
        assert layer.alone is (kind != "between" and name != "words that see padding")
        for head in range(HEADS):
            np.testing.assert_allclose(layer.logsumexp[head], whole["logsumexp"][head][real], atol=1e-5)
            np.testing.assert_allclose(layer.entropy[head], whole["entropy"][head][real], atol=1e-5)
            count = keep[head][real].sum(1)
            times = whole["weights"][head][real][:, real] * count[:, None]
            assert (layer.entropy[head] <= np.log(np.maximum(count, 1)) + 1e-5).all()
            np.testing.assert_allclose(layer.thumbnail[head], pooled(times, cut[head], 1, 1), atol=2e-5)
    run_on_page(Path(__file__).with_name("formulas.test.js"), render(layers, "Padded"), wanted, tmp_path)


@pytest.mark.parametrize("align", [-1, 4, 6, 9])
@pytest.mark.parametrize("words", [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
def test_distances_where_queries_stand_outside_of_the_words(align: int, words: list[int]) -> None:
    """The page computes them from where query 0 stands among the keys that are shown."""
    keep = torch.tensor([words])
    with torch.no_grad(), ch.watch(block := Block()) as seen:
        block(normal(1, 1, 2, 4), normal(1, 1, 6, 4, seed=1), mask=ch.Padding(keep), align=align)
    inputs, result, context = seen.calls[0].inputs, seen.calls[0].result, seen.calls[0].context._replace(kind="self")
    call = ch.models.AttentionCall(inputs._replace(padding=Words(keys=keep.bool())), result, context)
    layer = layer_from_call(call, ["a", "b"], list("uvwxyz"), error=0)
    assert isinstance(layer, Layer) and layer.alone and layer.position is not None
    weights = call.weights.dense()[0, 0, :, keep[0].bool()].numpy()
    own, shown = (np.abs(np.arange(2)[:, None] + at - np.arange(4)) for at in (align - words.index(1), layer.position))
    np.testing.assert_allclose(layer.distance[0], (weights * own).sum(1), atol=1e-5)
    np.testing.assert_array_equal(shown, own)


def whole_of_padding(scores: Any, keep: Any, head: int, real: Any) -> Any:
    """What words receive from queries that are padding, which the page does not count."""
    of = statistics_of(scores[head : head + 1], keep[head : head + 1], None, None)
    return of["weights"][0][~real][:, real].sum(0)
