"""Two heads of the page compared: the numbers are those of `compare` in Python."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import clearhead as ch

Make = Callable[..., Any]
COMPARED = "document.getElementById('clearhead').dataset.compare"
FENCES = "\u2068|\u2069"


def divergence(p: Any, q: Any) -> Any:
    """Jensen–Shannon of rows (…, n) in nats, by its definition."""
    middle = (p + q) / 2
    parts = [np.where(x > 0, x * np.log(np.where(x > 0, x, 1) / np.where(x > 0, middle, 1)), 0) for x in (p, q)]
    return (parts[0] + parts[1]).sum(-1) / 2


class Once(torch.nn.Module):
    def forward(self, query: Any, key: Any) -> Any:
        return F.scaled_dot_product_attention(query, key, key, is_causal=True)


def seen_of(seed: int, length: int = 40) -> Any:
    generator = torch.Generator().manual_seed(seed)
    query, key = (2.5 * torch.randn(1, 2, length, 8, generator=generator) for _ in range(2))
    with ch.watch(block := Once()) as seen:
        block(query.double(), key.double())
    return seen


def test_two_recordings_on_one_page_are_as_far_apart_as_in_python(open_report: Make, tmp_path: Path) -> None:
    before, after = seen_of(1), seen_of(2)
    found = before.compare(after)[0]
    both = ch.models.Recording([*before.calls, *after.calls])
    html = both.view(error=0).write(tmp_path / "both.html").read_text()
    for head in (0, 1):
        opened = open_report([], f"#a=0.{head}&b=1.{head}", html=html)
        opened.until(COMPARED, "drawn")
        page = opened.page.evaluate("clearhead.compare()")
        np.testing.assert_allclose(page["byQuery"], found.by_query[0, head], rtol=0, atol=1e-6)
        assert page["mean"] == pytest.approx(float(found.divergence[head]), abs=1e-6)
        said = opened.page.inner_text("#compare-said")
        shown = re.match(r"They are ([\d.]+) nats apart", said)
        assert shown and float(shown[1]) == pytest.approx(float(found.divergence[head]), rel=5e-3)
        difference = -found.weights[0, head].dense().double().numpy()
        for pair in page["largest"]:
            assert pair["a"] - pair["b"] == pytest.approx(difference[pair["i"], pair["j"]], abs=1e-6)
        sizes = np.sort(np.abs(difference).ravel())[::-1]
        largest = [abs(pair["a"] - pair["b"]) for pair in page["largest"]]
        np.testing.assert_allclose(largest, sizes[:12], atol=1e-6)


def test_sharp_weights_and_a_long_text(make_case: Make, open_report: Make) -> None:
    """Weights of 1e-30 beside 1; and of many pairs every second query."""
    sharp = make_case(30, heads=2, spread=8)
    assert sharp.weights.min() < 1e-30
    opened = open_report([sharp.layer], "#a=0.0&b=0.1")
    opened.until(COMPARED, "drawn")
    want = divergence(*sharp.weights)
    np.testing.assert_allclose(opened.page.evaluate("clearhead.compare().byQuery"), want, atol=1e-12)
    long = make_case(2100, heads=2, features=2)
    opened = open_report([long.layer], "#a=0.0&b=0.1")
    opened.until(COMPARED, "drawn", 60)
    got = np.array(opened.page.evaluate("clearhead.compare().byQuery"), dtype=float)
    assert np.isnan(got[1::2]).all()
    np.testing.assert_allclose(got[::2], divergence(*long.weights[:, ::2]), atol=1e-10)
    assert "Every second query of 2,100 is compared" in opened.page.inner_text("#compare-said")


def test_the_share_of_a_sink_is_one_key_more(make_case: Make, open_report: Make) -> None:
    case = make_case(12, heads=2)
    sinks = np.array([1.0, -0.5])
    total = np.logaddexp(case.layer.logsumexp, sinks[:, None])
    weights = case.weights * np.exp(case.layer.logsumexp - total)[..., None]
    layer = replace(case.layer, logsumexp=total, sinks=sinks)
    opened = open_report([layer], "#a=0.0&b=0.1")
    opened.until(COMPARED, "drawn")
    whole = np.concatenate([weights, 1 - weights.sum(-1, keepdims=True)], -1)
    np.testing.assert_allclose(opened.page.evaluate("clearhead.compare().byQuery"), divergence(*whole), atol=1e-12)


def test_what_words_give_to_padding_is_one_key_more(open_report: Make, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    query, key = (2 * torch.randn(1, 2, 9, 4, generator=generator) for _ in range(2))
    words = torch.arange(9)[None] > 2  # which no mask hides
    with torch.no_grad(), ch.watch(block := Once(), padding=words) as seen:
        block(query.flip(2), key)
    html = seen.view().write(tmp_path / "page.html").read_text()
    weights = seen.calls[0].weights.dense()[0].double().numpy()[:, 3:, 3:]
    lost = 1 - weights.sum(-1, keepdims=True)
    assert lost.max() > 0.2
    opened = open_report([], "#a=0.0&b=0.1", html=html)
    opened.until(COMPARED, "drawn")
    want = divergence(*np.concatenate([weights, lost], -1))
    np.testing.assert_allclose(opened.page.evaluate("clearhead.compare().byQuery"), want, atol=2e-4)


def test_queries_whose_masks_differ_are_left_out(make_case: Make, open_report: Make) -> None:
    stop = np.array([[1, 2, 3, 4, 5, 6], [1, 2, 6, 4, 5, 0]])
    case = make_case(6, heads=2, stop=stop)
    opened = open_report([case.layer], "#a=0.0&b=0.1")
    opened.until(COMPARED, "drawn")
    got = np.array(opened.page.evaluate("clearhead.compare().byQuery"), dtype=float)
    assert np.isnan(got[[2, 5]]).all()
    kept = [0, 1, 3, 4]
    np.testing.assert_allclose(got[kept], divergence(*case.weights[:, kept]), atol=1e-12)
    said = opened.page.inner_text("#compare-said")
    assert "a mean over 4 queries" in said and "2 queries left out: the masks differ" in said


def test_the_average_of_pinned_heads_and_uniform_attention(make_case: Make, open_report: Make) -> None:
    case = make_case(9, heads=4, stop=np.arange(9) + 1)
    opened = open_report([case.layer], "#pins=0.0_0.2_0.3&a=pins&b=uniform")
    opened.until(COMPARED, "drawn")
    mean = case.weights[[0, 2, 3]].mean(0)
    uniform = np.tri(9) / np.arange(1, 10)[:, None]
    np.testing.assert_allclose(
        opened.page.evaluate("clearhead.compare().byQuery"), divergence(mean, uniform), atol=1e-12
    )
    assert opened.page.inner_text("#compare-title") == "average of the 3 pinned − uniform attention"
    opened.page.select_option("#side-b", "0.0")
    opened.until("location.hash.includes('b=0.0')")
    opened.until(COMPARED, "drawn")
    assert opened.page.evaluate("clearhead.compare().mean") == pytest.approx(
        divergence(mean, case.weights[0]).mean(), abs=1e-12
    )


def test_heads_of_other_sizes_are_refused_in_words(make_case: Make, open_report: Make) -> None:
    layers = [make_case(6, name="a").layer, make_case(9, name="b").layer]
    page = open_report(layers, "#a=0.0&b=1.1").page
    page.wait_for_selector("#compare-said:has-text('cannot be compared')")
    said = page.inner_text("#compare-said")
    assert "one has 6 queries on 6 keys, another 9 queries on 9 keys" in said
    assert not page.is_visible("#apart")


def point(page: Any, i: int, j: int) -> list[int]:
    """The colour of a pair of 12 × 12 on the map of differences."""
    at = page.evaluate("clearhead.compare()")
    found: list[int] = page.locator("#apart").evaluate(
        """(canvas, at) => {
        const copy = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
        copy.getContext("2d").drawImage(canvas, ...at, 1, 1, 0, 0, 1, 1);
        return Array.from(copy.getContext("2d").getImageData(0, 0, 1, 1).data).slice(0, 3);
    }""",
        [at["left"] + int((j + 0.5) * at["cell"]), at["top"] + int((i + 0.5) * at["cell"])],
    )
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_hues_tell_which_is_more_and_the_ground_is_alike(make_case: Make, open_report: Make, scheme: Any) -> None:
    case = make_case(12, heads=2, stop=np.arange(12) + 1)
    opened = open_report([case.layer], "#a=0.0&b=0.1", color_scheme=scheme)
    opened.until(COMPARED, "drawn")
    apart = case.weights[0] - case.weights[1]
    up, down = (np.unravel_index(way(apart), apart.shape) for way in (np.argmax, np.argmin))
    red, _, blue = point(opened.page, int(up[0]), int(up[1]))
    assert blue > red + 20
    red, _, blue = point(opened.page, int(down[0]), int(down[1]))
    assert red > blue + 20
    ground = [255, 255, 255] if scheme == "light" else [26, 31, 40]
    assert np.abs(np.array(point(opened.page, 0, 0)) - ground).max() <= 8  # one key: 100% in both
    assert opened.page.inner_text("#apart-more") == "L0H0 more" and opened.page.inner_text("#apart-less") == "L0H1 more"


def test_pairs_are_chosen_in_the_list_on_the_map_and_by_keys(make_case: Make, open_report: Make) -> None:
    case = make_case(12, heads=2)
    opened = open_report([case.layer], "#a=0.0&b=0.1&token=3")
    opened.until(COMPARED, "drawn")
    page = opened.page
    apart = np.abs(case.weights[0] - case.weights[1])
    i, j = np.unravel_index(apart.argmax(), apart.shape)
    first = page.locator("#apart-list button").first
    shares = [float(x) / 100 for x in re.findall(r"([\d.]+)%", first.inner_text())]
    np.testing.assert_allclose(shares, case.weights[:, i, j], rtol=0.05)
    first.click()
    opened.until("document.getElementById('clearhead').dataset.shown", f"0/0/out/{i}/{j}")
    name = re.sub(FENCES, "", page.inner_text("#apart-pair"))
    assert name.startswith(f"w{i} → w{j}: ")
    page.locator("#apart").focus()
    page.keyboard.press("ArrowDown" if i < 11 else "ArrowUp")
    k = i + 1 if i < 11 else i - 1
    opened.until("document.getElementById('clearhead').dataset.shown", f"0/0/out/{k}/{j}")
    row = divergence(*case.weights)[k]
    assert f"{row:.3f} nats apart" in page.inner_text("#apart-pair")


def test_the_address_holds_both_and_back_goes_back(make_case: Make, open_report: Make) -> None:
    opened = open_report([make_case(8, heads=3).layer], "#layer=0&head=1&token=2")
    page = opened.page
    assert page.is_hidden("#compare")
    page.locator(".head[tabindex='0']").focus()
    page.keyboard.press("a")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("b")
    opened.until("location.hash", "#layer=0&head=1&token=2&a=0.1&b=0.2&all=1")
    opened.until(COMPARED, "drawn")
    assert page.inner_text("#compare-title") == "L0H1 − L0H2"
    page.click("#swap")
    opened.until("location.hash", "#layer=0&head=1&token=2&a=0.2&b=0.1&all=1")
    page.evaluate("history.back()")
    opened.until("location.hash", "#layer=0&head=1&token=2&a=0.1&b=0.2&all=1")
    page.click("#stop-comparing")
    opened.until("location.hash", "#layer=0&head=1&token=2&all=1")
    assert page.is_hidden("#compare")
    for bad in ("a=9.9&b=0.1", "a=%3Cb%3E&b=0.1", "a=0.1_0.2&b=0.0"):
        page.evaluate(f"location.hash = '#layer=0&head=0&token=1&{bad}'")
        opened.until("clearhead.state().token", 1)
        assert page.is_hidden("#compare")
