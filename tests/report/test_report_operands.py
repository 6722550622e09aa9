"""Queries and keys as whole multiples: how far the weights move, what is written, and what the page reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.models import bundled, load
from clearhead.report.operands import rounded, steps_of
from clearhead.scores.base import Pairwise


def drawn(heads: int, length: int, features: int, outlier: float = 1.0) -> torch.Tensor:
    made = torch.randn(heads, length, features, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    made[..., :2] *= outlier
    return made


def weights(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    repeated = key.repeat_interleave(len(query) // len(key), 0)
    return (scale * query.double() @ repeated.double().mT).softmax(-1)


@pytest.mark.parametrize(("error", "outlier"), [(1e-3, 1.0), (1e-4, 1.0), (1e-5, 1.0), (1e-3, 30.0), (1e-4, 30.0)])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 1)])
def test_the_worst_weight_follows_the_dial(error: float, outlier: float, heads: int, key_heads: int) -> None:
    query, key, scale = drawn(heads, 300, 32, outlier), drawn(key_heads, 400, 32, outlier), 0.7
    steps = steps_of(Pairwise("mul", query[None], key[None], None, scale), error)
    assert steps is not None
    query_, key_ = (rounded(t.float(), s) for t, s in zip((query, key), steps, strict=True))
    worst = (weights(query_, key_, scale) - weights(query.float(), key.float(), scale)).abs().max()
    assert 0.3 * error < worst < (1.5 if outlier == 1.0 else 2.5) * error  # there float32 is hardly finer


def test_steps_are_not_finer_than_float32() -> None:
    query, key = drawn(1, 300, 32, 1000.0), drawn(1, 300, 32, 1000.0)
    steps = steps_of(Pairwise("mul", query[None], key[None]), 1e-9)
    assert steps is not None
    assert (query.abs() / steps[0].unsqueeze(1)).max() <= 2**22


def test_a_real_model_at_the_default(open_report: Callable[..., Any]) -> None:
    model, tokenizer = load(bundled())
    text = "The animal did not cross the street because it was tired, and the street was wide and full of cars."
    inputs = tokenizer(text, return_tensors="pt")
    with torch.no_grad(), ch.watch(model) as seen:
        model(**inputs)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        eager = model(**inputs, output_attentions=True).attentions
    layers = seen.layers()
    page = open_report(layers).page
    for number, (layer, theirs) in enumerate(zip(layers, eager, strict=True)):
        assert layer.error is not None and 0 < layer.error < 1.5e-4
        head, query = number * 2, 3 * number
        row = np.array(page.evaluate("([l, h, q]) => clearhead.weights(l, h, q)", [number, head, query]))
        wanted = theirs[0, head, query].double().numpy()
        assert np.abs(row - wanted).max() < 1.5e-4
        assert abs(row.sum() - 1) < 1e-6  # the log-sum-exp is that of what is written
        assert np.abs(row - wanted).max() <= layer.error + 1e-6


def test_what_is_written_is_what_is_read(make_case: Callable[..., Any], open_report: Callable[..., Any]) -> None:
    model_query, model_key = drawn(2, 7, 8), drawn(1, 9, 8)
    model_query[0, 0, 0], model_key[0, 0, 1] = 3e5, -3e-9  # many bytes, and few
    seen = _seen(model_query.float(), model_key.float())
    layers = seen.layers()
    assert layers[0].operand_steps is not None
    page = open_report(layers).page
    for head in range(2):
        read = page.evaluate(f"clearhead.operands(0, {head})")
        assert np.array_equal(np.array(read[0], dtype=np.float32).reshape(7, 8), layers[0].query[head])
        assert np.array_equal(np.array(read[1], dtype=np.float32).reshape(9, 8), layers[0].key[0])


@pytest.mark.parametrize("odd", ["zero query", "zero key", "zero feature", "not a number", "far", "one feature"])
def test_odd_numbers(odd: str) -> None:
    query, key = (
        drawn(2, 5, 1 if odd == "one feature" else 8).float(),
        drawn(2, 6, 1 if odd == "one feature" else 8).float(),
    )
    if odd.startswith("zero"):
        where = {"zero query": (query, ...), "zero key": (key, ...), "zero feature": (key, (..., 3))}[odd]
        where[0][where[1]] = 0.0
    if odd == "not a number":
        query[0, 2, 3] = torch.nan
    if odd == "far":
        query[0, 2, 3], key[..., 3] = 1e30, 1e-30
    seen = _seen(query, key)
    (layer,) = seen.layers()
    plain = seen.layers(error=0)[0]
    if odd == "not a number":
        assert layer.operand_steps is None and layer.error is None
        np.testing.assert_array_equal(layer.query, plain.query)
        return
    mine = weights(torch.from_numpy(layer.query), torch.from_numpy(layer.key), layer.scale)
    theirs = weights(torch.from_numpy(plain.query), torch.from_numpy(plain.key), plain.scale)
    assert (mine - theirs).abs().max() < 2e-4


@pytest.mark.parametrize("error", [-1e-4, 0.2, float("nan"), "1e-4", True, None])
def test_a_dial_that_is_none_is_an_error(error: Any) -> None:
    with pytest.raises(ch.ClearheadError, match=r"^error is .*; pass how far a weight may be off"):
        _seen(drawn(1, 3, 4).float(), drawn(1, 3, 4).float()).layers(error=error)


def _seen(query: torch.Tensor, key: torch.Tensor) -> ch.models.Recording:
    class Block(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(query[None], key[None], key[None], enable_gqa=True)

    block = Block()
    with torch.no_grad(), ch.watch(block) as seen:
        block()
    return seen
