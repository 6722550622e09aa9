"""The weights that the page computes are those of NumPy in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from test_report_formulas import Block
from test_report_map import cells_of

import clearhead as ch

Make = Callable[..., Any]


def cases(make: Make) -> dict[str, Any]:
    n = 9
    i = np.arange(n)
    holes = np.where(np.random.default_rng(3).random((2, n, n)) < 0.3, -np.inf, 0.7)
    holes[:, 4] = -np.inf  # a query whose every key is a hole
    return {
        "plain": make(n),
        "one bias for all heads": make(n, bias=np.log1p(np.abs(i[:, None] - i))[None]),
        "grouped heads": make(n, heads=6, key_heads=2),
        "causal": make(n, stop=i + 1),
        "window": make(n, start=np.maximum(i - 2, 0), stop=np.minimum(i + 2, n)),
        "a span for each head": make(n, start=np.stack([0 * i, np.maximum(i - 1, 0)]), stop=i + 1),
        "a span past the end": make(n, start=i - 3, stop=i + 3),
        "holes": make(n, bias=holes),
        "softcap": make(n, softcap=2.0, spread=4.0),
        "softcap and bias": make(n, softcap=2.0, bias=holes),
        "an empty row": make(n, stop=np.where(i == 5, 0, n)),
        "cross": make(4, 11, kind="cross", query_tokens=list("abcd"), key_tokens=list("efghijklmno")),
        "cross, more queries": make(11, 2, kind="cross", key_tokens=["x", "y"]),
        "a cache": make(1, 6, key_tokens=list("abcdef")),
        "one token": make(1),
        "one feature": make(n, features=1),
        "far scores": make(n, spread=30.0),
        "long": make(150, heads=1, stop=np.arange(150) + 1),
    }


def test_every_row_equals_numpy(make_case: Make, open_report: Make) -> None:
    named = cases(make_case)
    layers = [case.layer for case in named.values()]
    page = open_report(layers).page
    for number, (name, case) in enumerate(named.items()):
        heads, queries, _ = case.weights.shape
        rows = page.evaluate(
            """async ([layer, heads, queries]) => {
                const all = [];
                for (let h = 0; h < heads; h++) for (let i = 0; i < queries; i++)
                    all.push(await clearhead.weights(layer, h, i));
                return all;
            }""",
            [number, heads, queries],
        )
        shown = np.array(rows).reshape(case.weights.shape)
        np.testing.assert_allclose(shown, case.weights, rtol=0, atol=1e-9, err_msg=name)


def test_the_shown_row_and_column(make_case: Make, open_report: Make) -> None:
    case = make_case(12, stop=np.arange(12) + 1)
    opened = open_report([case.layer], "#head=1&token=7")
    row = opened.page.evaluate("clearhead.look()")
    np.testing.assert_allclose(row, case.weights[1, 7], rtol=0, atol=1e-9)
    opened.page.get_by_label("is looked at by").check()
    opened.until("document.getElementById('clearhead').dataset.shown.split('/')[2]", "in")
    column = opened.page.evaluate("clearhead.look()")
    np.testing.assert_allclose(column, case.weights[1, :, 7], rtol=0, atol=1e-9)


def test_the_map_holds_the_weights_and_knows_what_is_masked(make_case: Make, open_report: Make) -> None:
    case = make_case(10, start=np.arange(10) // 2, stop=np.arange(10) + 1)
    page = open_report([case.layer], "#scale=log").page
    pool = cells_of(page)
    i, j = np.indices((10, 10))
    seen = (i // 2 <= j) & (j <= i)
    np.testing.assert_allclose(pool[seen], case.weights[0][seen], rtol=1e-6)
    assert (pool[~seen] == -1).all()


def test_holes_are_masked_and_not_counted(make_case: Make, open_report: Make) -> None:
    n = 6
    case = make_case(n, bias=np.where(np.eye(n) > 0, -np.inf, 0.0)[None])
    page = open_report([case.layer], "#token=2").page
    pool = cells_of(page)
    assert ((pool == -1) == (np.eye(n) > 0)).all()
    assert "rank 1 of the 5 keys of “" in page.inner_text("#pair-place")
    assert "1/5 = 20.0%" in page.inner_text("#legend-equal")


def test_a_map_with_more_pairs_than_pixels_shows_the_maximum(make_case: Make, open_report: Make) -> None:
    n = 500
    case = make_case(n, heads=1, stop=np.arange(n) + 1)
    page = open_report([case.layer], "#scale=log", viewport={"width": 360, "height": 600}).page
    shown = page.evaluate("clearhead.map()")
    per, cells = shown["across"]["per"], shown["across"]["cells"]
    assert per == 3 and cells == 167
    padded = np.pad(case.weights[0], (0, cells * per - n))
    blocks = padded.reshape(cells, per, cells, per).max((1, 3))
    pool = cells_of(page)
    row, column = np.indices(pool.shape)
    np.testing.assert_allclose(pool[row >= column], blocks[row >= column], rtol=1e-6)
    assert (pool[row < column] == -1).all()
    assert "largest weight of 3 × 3 pairs" in page.inner_text("#map-note")


def test_a_weight_that_is_no_number_is_said_to_be_none(make_case: Make, open_report: Make) -> None:
    layer = make_case(4, heads=1).layer
    layer.query[0, 2, 0] = np.nan
    page = open_report([layer], "#token=2").page
    assert np.isnan(page.evaluate("clearhead.look()")).all()
    assert "not a number" in page.inner_text("#pair-title")


def test_a_row_with_no_number_before_a_masked_key(make_case: Make, open_report: Make) -> None:
    hidden = np.zeros((1, 4, 4))
    hidden[..., 3] = -np.inf
    layer = make_case(4, heads=1, bias=hidden).layer
    layer.key[0, 2, 0] = np.nan
    row = open_report([layer], "#token=2").page.evaluate("clearhead.look()")
    assert np.isnan(row[:3]).all() and row[3] == 0


def test_the_spread_of_a_row_whose_sink_takes_all(make_case: Make, open_report: Make) -> None:
    layer = make_case(4, heads=1, spread=0.1).layer
    sinks = np.array([900.0])  # e^-900 is 0 in float64
    layer = dataclasses.replace(layer, sinks=sinks, logsumexp=np.full((1, 4), 900.0))
    page = open_report([layer], "#token=2").page
    assert np.array_equal(page.evaluate("clearhead.look()"), np.zeros(4))
    assert f"entropy\n{layer.entropy[0, 2]:.2f} nats of at most 1.39" in page.inner_text("#facts")
    assert "NaN" not in page.inner_text("#facts")


def test_lengths_of_values_in_low_precision(open_report: Make, tmp_path: Path) -> None:
    value = torch.randn(1, 1, 5, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad(), ch.watch(block := Block(), values=True) as seen:
        block(value, value)
    html = seen.view().write(tmp_path / "page.html").read_text()
    page = open_report([], "#token=2", html=html).page
    j = int(np.argmax(page.evaluate("clearhead.look()")))
    moved = float(page.evaluate("clearhead.look()")[j] * value[0, 0, j].double().norm())
    assert f"‖weight · value‖ = {moved:.3g}," in page.inner_text("#pair-moves")
    assert seen.calls[0].value_norms.dtype == torch.float32
