"""Using the page: keyboard, pointer, links, themes, widths."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

Make = Callable[..., Any]

WORDS = ["the", "map", "persuaded", "people", "that", "it", "was", "the", "water"]


@pytest.fixture
def layers(make_case: Make) -> list[Any]:
    n = len(WORDS)
    return [
        make_case(n, query_tokens=WORDS, heads=4, name="decoder.0.self", seed=1).layer,
        make_case(n, query_tokens=WORDS, heads=2, name="decoder.1.self", stop=np.arange(n) + 1).layer,
        make_case(
            n, 5, kind="cross", heads=3, name="decoder.1.cross",
            query_tokens=WORDS, key_tokens=["das", "Wasser", "war", "es", "."],
        ).layer,
    ]  # fmt: skip


ROOT = "document.getElementById('clearhead').shadowRoot"


def test_a_token_by_keyboard(layers: list[Any], open_report: Make) -> None:
    opened = open_report(layers, "#token=1")
    page = opened.page
    page.locator(".token.chosen").focus()
    page.keyboard.press("ArrowRight")
    opened.until("clearhead.state().token", 2)
    page.keyboard.press("End")
    opened.until("clearhead.state().token", len(WORDS) - 1)
    assert page.evaluate(f"{ROOT}.activeElement.textContent") == "water"
    assert page.locator(".token[aria-selected=true]").inner_text() == "water"


def test_the_strongest_keys_and_the_rest(layers: list[Any], make_case: Make, open_report: Make) -> None:
    case = make_case(40, heads=1)
    page = open_report([case.layer], "#token=3").page
    order = np.argsort(-case.weights[0, 3])
    names = page.locator("#strongest .name").all_text_contents()
    assert names == [f"w{j} {j}" for j in order[:8]]
    shares = page.locator("#strongest .share").all_inner_texts()
    wanted = 100 * case.weights[0, 3, order]
    for share, exact in zip(shares, wanted, strict=False):
        assert float(share.rstrip("%")) == pytest.approx(exact, rel=0.05)
    rest = page.inner_text("#strongest .rest")
    assert rest.startswith("the other 32: ")
    assert float(rest.split()[-1].rstrip("%")) == pytest.approx(wanted[8:].sum(), rel=0.05)
    top = case.weights[0, 3, order[0]]
    assert page.inner_text("#pair-place").startswith("rank 1 of the 40 keys of “")
    assert float(page.inner_text("#pair-place").split(", ")[1].split()[0]) == pytest.approx(top * 40, rel=0.05)


def test_looked_at_by_ranks_the_column(make_case: Make, open_report: Make) -> None:
    case = make_case(12, heads=1)
    opened = open_report([case.layer], "#token=3")
    page = opened.page
    page.get_by_label("is looked at by").check()
    opened.until("clearhead.state().view", "in")
    order = np.argsort(-case.weights[0, :, 3])
    assert page.locator("#strongest .name").first.text_content() == f"w{order[0]} {order[0]}"
    assert "What looks at" in page.inner_text("#prose-title")
    assert page.inner_text("#pair-place").startswith("rank 1 of the 12 queries that see “\u2068w3\u2069”, ")


def test_pointing_at_the_map(make_case: Make, open_report: Make) -> None:
    case = make_case(12, heads=1, stop=np.arange(12) + 1)
    opened = open_report([case.layer])
    page = opened.page
    shown = page.evaluate("clearhead.map()")

    def place(i: int, j: int) -> dict[str, float]:
        x = shown["left"] + (j + 0.5) * shown["across"]["cell"]
        return {"x": x, "y": shown["top"] + (i + 0.5) * shown["down"]["cell"]}

    page.locator("#map").hover(position=place(7, 2))
    weight = case.weights[0, 7, 2]
    rank = 1 + (case.weights[0, 7, :8] > weight).sum()
    text = page.inner_text("#pair-title").replace("\u2068", "").replace("\u2069", "")
    assert text.startswith("“w7” → “w2” ")
    assert page.inner_text("#pair-place").startswith(f"rank {rank} of the 8 keys of “")
    assert float(text.split()[-1].rstrip("%")) == pytest.approx(100 * weight, rel=0.05)
    page.locator("#map").hover(position=place(2, 7))
    assert "masked" in page.inner_text("#pair-title")
    chosen = "“w6” → "  # the pair that is chosen comes back
    page.locator("#map").hover(position={"x": 2, "y": 2})  # among the labels
    assert page.inner_text("#pair-title").replace("\u2068", "").replace("\u2069", "").startswith(chosen)
    page.locator("#map").click(position=place(7, 2))
    opened.until("document.getElementById('clearhead').dataset.shown", "0/0/out/7/2")
    page.locator("#map").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    opened.until("document.getElementById('clearhead').dataset.shown", "0/0/out/6/1")


def test_cross_attention_has_two_texts(layers: list[Any], open_report: Make) -> None:
    opened = open_report(layers, "#layer=2&token=1")
    page = opened.page
    assert page.locator(".prose").all_inner_texts() == [" ".join(WORDS), "das Wasser war es."]
    page.get_by_text("Wasser", exact=True).first.click()
    opened.until("clearhead.state().view + clearhead.state().token", "in1")
    assert page.locator(".token.chosen").inner_text() == "Wasser"


def test_a_link_brings_back_what_was_shown(layers: list[Any], open_report: Make) -> None:
    opened = open_report(layers, "#layer=1&head=1&token=4&view=in&scale=linear")
    assert opened.shown.startswith("1/1/in/4/")
    assert opened.page.locator("input[value=linear]").is_checked()
    opened.page.locator(".head").first.click()
    opened.until("location.hash", "#layer=0&head=0&token=4&view=in&scale=linear&all=1")
    opened.page.evaluate("history.back()")  # a browser's button passes by what it saw no gesture for, if it is slow
    opened.until("location.hash", "#layer=1&head=1&token=4&view=in&scale=linear&all=1")
    opened.until("document.getElementById('clearhead').dataset.shown.slice(0, 8)", "1/1/in/4")
    opened.page.locator("#strongest button").nth(2).click()
    link = opened.page.evaluate("location.hash")
    assert "pair=" in link and open_report(layers, link).shown == opened.shown


def test_a_choice_that_is_overtaken_is_still_a_step_back(layers: list[Any], open_report: Make) -> None:
    opened = open_report(layers, "#layer=1&head=1&token=4")
    before = opened.page.evaluate("history.length")
    opened.page.evaluate(f"{ROOT}.querySelector('.head').click(); {ROOT}.getElementById('theme').click()")
    opened.until("location.hash.slice(0, 15)", "#layer=0&head=0")
    assert opened.page.evaluate("history.length") == before + 1


def test_a_bad_link_shows_the_first_head(layers: list[Any], open_report: Make) -> None:
    opened = open_report(layers, "#layer=99&head=-1&token=1e9")
    assert opened.shown.startswith("0/0/out/4/")
    for bad in ("layer=%3Cb%3E&token=", "__proto__=1", "%E0%A4%A"):
        opened.page.evaluate("location.hash = 'layer=1'")
        opened.until("document.getElementById('clearhead').dataset.shown.slice(0, 4)", "1/0/")
        opened.page.evaluate(f"location.hash = '{bad}'")
        opened.until("document.getElementById('clearhead').dataset.shown.slice(0, 4)", "0/0/")


def test_a_query_that_sees_nothing_says_so(make_case: Make, open_report: Make) -> None:
    case = make_case(5, stop=[5, 5, 0, 5, 5])
    page = open_report([case.layer], "#token=2").page
    assert "no key" in page.inner_text("#pair-place")


CONTRAST = """() => {
    const light = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(Number).map((c) => c / 255)
            .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (e) => {
        const colour = getComputedStyle(e).backgroundColor;
        const around = e.parentElement || e.getRootNode().host;
        return colour === 'rgba(0, 0, 0, 0)' && around ? ground(around) : colour;
    };
    const poor = [];
    for (const e of document.getElementById('clearhead').shadowRoot.querySelectorAll('*')) {
        const written = Array.from(e.childNodes).some((n) => n.nodeType === 3 && n.data.trim());
        if (!written || !e.checkVisibility()) continue;
        const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
        if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(e.outerHTML);
    }
    return poor;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_theme_and_width_can_be_read(layers: list[Any], open_report: Make, scheme: Any) -> None:
    opened = open_report(layers, "#layer=2&token=1&tokens=1-2&arcs=1&pins=0.1_1.1&a=0.1&b=0.2", color_scheme=scheme)
    page = opened.page
    opened.until("document.getElementById('clearhead').dataset.compare", "drawn")
    ground = page.evaluate("getComputedStyle(document.getElementById('clearhead')).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) > 384) == (scheme == "light")
    for show in ("squares", "maps", "list", "scatter"):
        page.locator(f"#heads-as input[value={show}]").check(force=True)
        assert page.evaluate(CONTRAST) == [], show
    for width in (360, 800, 1600):
        page.set_viewport_size({"width": width, "height": 800})
        opened.until("document.documentElement.scrollWidth <= innerWidth")
        opened.until(
            "document.getElementById('clearhead').shadowRoot.querySelector('#map-box').scrollWidth <= innerWidth"
        )


def test_the_theme_can_change_while_the_page_is_open(layers: list[Any], open_report: Make) -> None:
    opened = open_report(layers, "#show=maps", color_scheme="light")
    pixels = "document.getElementById('clearhead').shadowRoot.querySelector('.head canvas').toDataURL()"
    before = opened.page.evaluate(pixels)
    opened.page.emulate_media(color_scheme="dark")
    opened.until(f"{pixels} !== {before!r}")


def test_what_a_head_gives_its_sink_is_said(make_case: Make, open_report: Make) -> None:
    case = make_case(5, heads=1, stop=[5, 5, 0, 5, 5])
    sinks = np.array([0.5])
    total = np.where(np.isneginf(case.layer.logsumexp), -np.inf, np.logaddexp(case.layer.logsumexp, sinks[:, None]))
    opened = open_report([replace(case.layer, sinks=sinks, logsumexp=total)])
    share = np.exp(sinks[0] - total[0][[0, 1, 3, 4]]).mean()
    said = re.search(r"· (\S+)% of its weight goes to no key", opened.page.inner_text("#where"))
    assert said and float(said[1]) == pytest.approx(100 * share, abs=0.6)
