"""The steps of a weight in the page are those of `explain`, with its numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eager import scores_of
from test_report_formulas import CASES, layer_of

import clearhead as ch
from clearhead.models import bundled, load
from clearhead.report.why import with_steps

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from small_models import MODELS, OWN_EAGER, inputs_of, pair

ROOT = "document.getElementById('clearhead').shadowRoot"
FIRST = {"query", "key", "value", "bias", "sink", "mask"}
RIGHT = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])


def steps_of(call: ch.models.AttentionCall, pair_: tuple[int, int, int]) -> list[tuple[str, str, float]]:
    """Name, formula and number of each step from the products to the weight, of one pair: head, query, key."""
    explanation = call.explain((0, *pair_))
    found, last = [], False
    for step in explanation.steps:
        if "Lq" not in step.axes or step.aside or step.given or last:
            continue
        if step.name in FIRST or (step.value.dtype == torch.bool and step.name != "blind"):
            continue  # what a mask is made of: the page is given its rows
        if not found and step.axes[-1] != "Lk":
            continue  # what the query is made of
        at = (0, 0, 0, pair_[2] if step.value.shape[-1] > 1 else 0)
        found.append((step.name, step.formula, float(step.value[at])))
        last = step.name == "weights"
    return found


def check(opened: Any, layer: int, call: ch.models.AttentionCall, pair_: tuple[int, int, int]) -> None:
    shown = opened.page.evaluate("([l, h, i, j]) => clearhead.why(l, h, i, j)", [layer, *pair_])
    mine = steps_of(call, pair_)
    assert [(name, formula) for name, formula, _ in shown] == [(name, formula) for name, formula, _ in mine]
    for (name, _, theirs), (_, _, number) in zip(shown, mine, strict=True):
        theirs = float("-inf") if theirs is None else theirs
        assert math.isclose(theirs, number, rel_tol=2e-5, abs_tol=2e-6), (name, theirs, number)


@pytest.mark.parametrize("name", ["Bert", "Llama", "Gemma2", "T5", "GptOss", "GPT2", "Qwen3"])
def test_the_steps_are_those_of_explain(name: str, open_report: Callable[..., Any]) -> None:
    model, _ = pair(name, {**MODELS, **OWN_EAGER}[name])
    with torch.no_grad(), ch.watch(model) as seen:
        model(**inputs_of(name))
    layers = seen.layers(error=0)
    opened = open_report(layers)
    for layer, call in enumerate(seen.calls):
        queries, keys = call.weights.shape[-2:]
        for pair_ in [(0, 0, 0), (3, queries - 1, keys // 2), (1, 2, keys - 1)]:
            check(opened, layer, call, pair_)


def test_the_table_shows_them(open_report: Callable[..., Any]) -> None:
    model, tokenizer = load(bundled())
    inputs = tokenizer("The quick brown fox jumps over the lazy dog.", return_tensors="pt")
    words = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    with torch.no_grad(), ch.watch(model) as seen:
        model(**inputs)
    opened = open_report(seen.layers(words, error=0), "#layer=3&head=5&token=5")
    check(opened, 3, seen[3], (5, 5, 4))
    opened.page.locator("#strongest button").nth(2).click()
    opened.until("document.getElementById('clearhead').dataset.shown.split('/')[2]", "out")
    key = int(opened.shown.split("/")[4])
    rows = opened.page.locator("#sum tr")
    wanted = steps_of(seen[3], (5, 5, key))
    assert rows.count() == len(wanted)
    for n, (name, formula, number) in enumerate(wanted):
        row = rows.nth(n)
        assert row.get_attribute("data-step") == name
        assert row.locator(".formula").inner_text() == formula
        assert float(row.locator("td").inner_text()) == pytest.approx(number, rel=2e-4, abs=2e-4)
        assert row.locator(".made").inner_text().startswith("= ")


def test_masked_pairs_and_rows_that_see_nothing(open_report: Callable[..., Any]) -> None:
    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            keep = torch.ones(5, 5, dtype=torch.bool).tril()
            keep[2] = False
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=keep)

    block = Block()
    with torch.no_grad(), ch.watch(block) as seen:
        block(torch.randn(1, 2, 5, 4))
    opened = open_report(seen.layers(error=0))
    for layer, call in enumerate(seen.calls):
        rows = opened.page.evaluate("([l]) => clearhead.why(l, 1, 1, 3)", [layer])
        by_name = {name: number for name, _, number in rows}
        assert by_name["weights"] == 0.0
        assert by_name["masked"] == float("-inf")
        check(opened, layer, call, (1, 3, 1))
        blind = {name: number for name, _, number in opened.page.evaluate("clearhead.why(0, 1, 2, 3)")}
        assert blind["blind"] == 1
        check(opened, layer, call, (1, 2, 3))
        assert blind["weights"] == 0


PHIS = {
    "additive": "scores[i, j] = Σ_d weight[d] · tanh(query[i, d] + key[j, d])",
    "additive, softcap, causal": "uncapped[i, j] = Σ_d weight[d] · tanh(query[i, d] + key[j, d])",
    "gaussian": "unscaled[i, j] = Σ_d (query[i, d] - key[j, d])²",
    "gaussian, learnt": "scores[i, j] = Σ_d weight[d] · (query[i, d] - key[j, d])²",
    "weighted": "unscaled[i, j] = Σ_d weight[d] · query[i, d] · key[j, d]",
}


def test_every_score_of_terms_has_its_steps(open_report: Callable[..., Any]) -> None:
    options = {name: CASES[name] for name in PHIS if name in CASES}
    layers = [layer_of(each)[0] for each in options.values()]
    weighted = replace(layers[0], phi="mul", steps=(), scale=0.5)
    layers.append(with_steps(replace(weighted, logsumexp=logsumexp_of(weighted))))
    opened = open_report(layers)
    page = opened.page
    for at, (layer, formula) in enumerate(zip(layers, PHIS.values(), strict=True)):
        scores = scores_of(layer)
        for head, i, j in [(0, 0, 0), (1, 3, 2)]:
            rows = page.evaluate("([l, h, i, j]) => clearhead.why(l, h, i, j)", [at, head, i, j])
            by_name = {name: number for name, _, number in rows}
            assert rows[0][1] == formula
            assert by_name["scores"] == pytest.approx(scores[head, i, j], rel=1e-6)
            weights = page.evaluate("([l, h, i]) => clearhead.weights(l, h, i)", [at, head, i])
            assert by_name["weights"] == pytest.approx(weights[j], rel=1e-6)
        page.evaluate(f"location.hash = '#layer={at}&head=1&token=3&pair=2'")
        opened.until("document.getElementById('clearhead').dataset.shown", f"{at}/1/out/3/2")
        assert page.locator("#sum tr .formula").first.inner_text() == formula
        assert page.locator("#sum tr .made").first.inner_text().startswith("= ")


def logsumexp_of(layer: Any) -> Any:
    scores = scores_of(layer)
    return np.log(np.exp(scores).sum(-1))


def test_a_long_row_is_filled_in_when_the_page_rests(
    make_case: Callable[..., Any], open_report: Callable[..., Any]
) -> None:
    case = make_case(1, 3000, kind="cross", heads=1, key_tokens=[f"k{n}" for n in range(3000)])
    opened = open_report([case.layer])
    opened.until("document.getElementById('clearhead').shadowRoot.querySelectorAll('#sum tr').length", 6)
    last = opened.page.locator("#sum tr").last
    key = int(opened.shown.split("/")[4])
    assert float(last.locator("td").inner_text()) == pytest.approx(case.weights[0, 0, key], rel=1e-3, abs=5e-5)
