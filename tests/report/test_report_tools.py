"""What can be taken away from the page, its themes, its keys, print; and a report's pair pane."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

Make = Callable[..., Any]
WORDS = ["the", "pump", "=1+1", 'a "quoted", one', "</text><script>", "fell"]
ROOT = "document.getElementById('clearhead').shadowRoot"


@pytest.fixture
def case(make_case: Make) -> Any:
    return make_case(6, heads=2, query_tokens=WORDS, stop=np.arange(6) + 1)


def saved(opened: Any, what: str, folder: Path) -> str:
    opened.page.locator("#save summary").click()
    with opened.page.expect_download() as waited:
        opened.page.locator(f"[data-save={what}]").click()
    waited.value.save_as(folder / "saved")
    return (folder / "saved").read_text(encoding="utf-8")


def test_a_row_as_csv(case: Any, open_report: Make, tmp_path: Path) -> None:
    opened = open_report([case.layer], "#head=1&token=4")
    rows = list(csv.DictReader(io.StringIO(saved(opened, "row", tmp_path))))
    assert [row["token"] for row in rows] == [w if w != "=1+1" else "'=1+1" for w in WORDS]
    np.testing.assert_allclose([float(row["weight"]) for row in rows], case.weights[1, 4], atol=1e-9)
    np.testing.assert_allclose([float(row["times_uniform"]) for row in rows], 5 * case.weights[1, 4], atol=1e-9)
    assert [row["allowed"] for row in rows] == ["true"] * 5 + ["false"]


def test_the_map_as_svg_with_its_words(case: Any, open_report: Make, tmp_path: Path) -> None:
    opened = open_report([case.layer], "#head=1")
    svg = ElementTree.fromstring(saved(opened, "map", tmp_path))
    texts = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:6] == WORDS and texts[6:12] == WORDS  # one for each row and column, as text
    cells = svg.findall("{http://www.w3.org/2000/svg}g/{http://www.w3.org/2000/svg}rect")
    fills = np.array([cell.get("fill") for cell in cells]).reshape(6, 6)
    masked = fills[0, 1]
    assert ((fills == masked) == (np.triu(np.ones((6, 6)), 1) > 0)).all()
    assert not list(svg.iter("{http://www.w3.org/2000/svg}script"))


def test_the_text_as_svg(case: Any, open_report: Make, tmp_path: Path) -> None:
    svg = ElementTree.fromstring(saved(open_report([case.layer]), "text", tmp_path))
    assert [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")] == WORDS


def test_the_saved_text_has_its_arcs_and_letters_as_on_the_page(
    make_case: Make, open_report: Make, tmp_path: Path
) -> None:
    case = make_case(6, heads=1, query_tokens=["[CLS]", "the", "pump", "in", "Broad", "Street"])
    opened = open_report([case.layer], "#token=3&arcs=1")
    svg = ElementTree.fromstring(saved(opened, "text", tmp_path))
    space = "{http://www.w3.org/2000/svg}"
    drawn = opened.page.locator(".arcs path")
    paths = svg.findall(f"{space}path")
    assert [one.get("d") for one in paths] == [drawn.nth(at).get_attribute("d") for at in range(drawn.count())]
    assert all("fill: none" in str(one.get("style")) and "stroke: rgb" in str(one.get("style")) for one in paths)
    special = next(one for one in svg.iter(f"{space}text") if one.text == "[CLS]")
    letters = f"""(() => {{
        const range = document.createRange();
        range.selectNodeContents({ROOT}.querySelector(".token.special"));
        const frame = {ROOT}.getElementById("texts").getBoundingClientRect();
        return [range.getBoundingClientRect().left - frame.left, range.getBoundingClientRect().width];
    }})()"""
    at, wide = opened.page.evaluate(letters)
    assert [float(special.get("x", 0)), float(special.get("textLength", 0))] == pytest.approx([at, wide], abs=0.5)


def test_a_caption_names_model_layer_head_and_scale(case: Any, open_report: Make, tmp_path: Path) -> None:
    words = saved(open_report([case.layer], "#head=1&scale=log"), "caption", tmp_path)
    for part in ("A report", "L0H1", case.layer.name, "log scale", "6 queries"):
        assert part in words


def test_the_theme_is_switched_and_print_is_light(case: Any, open_report: Make) -> None:
    opened = open_report([case.layer])
    ground = "getComputedStyle(document.getElementById('clearhead')).backgroundColor"
    light = opened.page.evaluate(ground)
    opened.page.locator("#theme").click()
    opened.until(f"{ground} !== {light!r}")
    opened.page.emulate_media(media="print")
    opened.until(ground, "rgb(255, 255, 255)")
    opened.page.emulate_media(media="null")
    opened.until(f"{ground} !== {light!r}")
    opened.page.locator("#theme").click()
    opened.until(ground, light)


def test_print_keeps_the_shading(case: Any, open_report: Make) -> None:
    opened = open_report([case.layer])
    opened.page.emulate_media(media="print")
    kept = f"getComputedStyle({ROOT}.querySelector('.token')).printColorAdjust"
    assert opened.page.evaluate(kept) == "exact"
    assert not opened.page.locator("#tools").is_visible()
    assert len(opened.page.pdf()) > 20_000  # pictures and all
    opened.page.emulate_media(media="null")


def test_keys(case: Any, open_report: Make) -> None:
    opened = open_report([case.layer], "#token=3")
    page = opened.page
    page.locator(".token.chosen").focus()
    page.keyboard.press("s")
    opened.until("clearhead.state().scale", "log")
    page.keyboard.press("x")
    opened.until("clearhead.state().view", "in")
    page.keyboard.press("l")
    assert page.locator("#present").get_attribute("aria-pressed") == "true"
    page.keyboard.press("?")
    assert page.locator("#help").is_visible() and "zoom" in page.inner_text("#key-list")
    page.keyboard.press("s")  # in the list, letters do nothing
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()
    assert page.evaluate("clearhead.state().scale") == "log"


LETTERS = """window.letters = [];
const write = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (...given) {
    window.letters.push(parseFloat(this.font.match(/([\\d.]+)px/)[1]));
    return write.apply(this, given);
};"""


def test_larger_fills_the_width_with_the_map_and_has_larger_letters_on_it(make_case: Make, open_report: Make) -> None:
    for count in (12, 90):
        opened = open_report([make_case(count, heads=2).layer], "#token=3&pair=2&a=0.0&b=0.1", init=LETTERS)
        page = opened.page
        opened.until("document.getElementById('clearhead').dataset.compare", "drawn")
        letters = set(page.evaluate("window.letters"))
        page.evaluate("window.letters.length = 0")
        page.locator("#present").click()
        wide = f"{ROOT}.getElementById('%s').clientWidth / {ROOT}.getElementById('%s').clientWidth > 0.9"
        fits = f"{ROOT}.getElementById('map').clientHeight <= innerHeight"
        opened.until(wide % ("map", "map-box"))
        opened.until(wide % ("apart", "apart-box"))
        opened.until(fits)
        page.wait_for_timeout(200)
        assert min(page.evaluate("window.letters")) >= 1.3 * min(letters)
        shown = page.evaluate("clearhead.map()")
        axes = shown["across"], shown["down"]
        x, y = (a["cell"] * 7.5 + shown[side] for a, side in zip(axes, ("left", "top"), strict=True))
        page.locator("#map").click(position={"x": x / shown["ratio"], "y": y / shown["ratio"]})
        opened.until("document.getElementById('clearhead').dataset.shown", "0/0/out/7/7")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_paper_the_map_is_drawn_and_no_button_stands(make_case: Make, open_report: Make, scheme: str) -> None:
    case = make_case(60, heads=1, stop=np.arange(60) + 1)
    opened = open_report([case.layer], color_scheme=scheme, viewport={"width": 1280, "height": 1200})
    page = opened.page
    page.evaluate("window.requestAnimationFrame = () => 0")  # paper waits for no frame
    page.emulate_media(media="print", color_scheme=scheme)
    ink = f"""(() => {{
        const canvas = {ROOT}.getElementById("map-picture");
        const {{ left, top, across, ratio }} = clearhead.map();
        const pen = canvas.getContext("2d");
        return [...pen.getImageData(left + across.cell / 2, top + across.cell / 2, 1, 1).data];
    }})()"""
    opened.until(f"{ROOT}.getElementById('map-picture').clientWidth > 700")
    assert page.evaluate(ink) == [255, 255, 255, 255]  # the first token on itself, 1 × uniform: white where it is drawn
    for control in ("#text-tools", "#map-bar", "#sides", "#pin", "#tools"):
        assert not page.locator(control).is_visible(), control
    for pane in ("#strongest", "#facts", "#reading", "#overview"):
        assert page.locator(pane).is_visible(), pane
    page.set_viewport_size({"width": 700, "height": 900})  # of paper with margins
    assert page.locator("#strongest").is_visible() and page.locator("#facts").is_visible()
    page.emulate_media(media="null")


def test_what_each_dimension_adds(case: Any, open_report: Make) -> None:
    opened = open_report([case.layer], "#head=1&token=4&pair=2")
    opened.page.locator("#terms summary").click()
    layer = case.layer
    terms = layer.scale * layer.query[1, 4].astype(np.float64) * layer.key[1, 2]
    order = np.argsort(-np.abs(terms))
    names = opened.page.locator("#term-list .name").all_inner_texts()
    shares = [float(x.replace("−", "-")) for x in opened.page.locator("#term-list .share").all_inner_texts()]
    assert names == [f"dimension {d}" for d in order[:6]] + ["the other 2"]
    np.testing.assert_allclose(shares, [*terms[order[:6]], terms[order[6:]].sum()], atol=6e-4)
    together = re.search(r"sum (\S+):", opened.page.inner_text("#term-sum"))
    assert together and float(together[1].replace("−", "-")) == pytest.approx(terms.sum(), abs=6e-4)


def test_the_same_pair_in_all_heads(make_case: Make, open_report: Make) -> None:
    cases = [make_case(6, heads=3, name=f"layer.{n}", seed=n) for n in range(2)]
    opened = open_report([one.layer for one in cases], "#token=4&pair=2")
    opened.page.locator("#everywhere summary").click()
    opened.until(f"{ROOT}.querySelectorAll('.square').length", 6)
    labels = opened.page.locator(".square").evaluate_all("all => all.map((e) => e.getAttribute('aria-label'))")
    shown = [float(label.split(": ")[1].rstrip("%")) for label in labels]
    weights = np.concatenate([one.weights[:, 4, 2] for one in cases])
    np.testing.assert_allclose(shown, 100 * weights, rtol=0.06)
    opened.page.locator(".square").nth(4).click()
    opened.until("document.getElementById('clearhead').dataset.shown", "1/1/out/4/2")


def test_the_focus_stays_among_the_squares_of_a_pair(case: Any, open_report: Make) -> None:
    opened = open_report([case.layer], "#head=0&token=4&pair=2")
    opened.page.locator("#everywhere summary").click()
    opened.page.locator(".square").nth(1).click()
    opened.until(f"{ROOT}.activeElement?.getAttribute('aria-label')?.slice(0, 5)", "L0H1:")
    opened.until(f"{ROOT}.activeElement.getAttribute('aria-current')", "true")


def test_a_weight_near_none_is_said_to_be_below_what_matters(make_case: Make, open_report: Make) -> None:
    case = make_case(6, heads=1, spread=15.0)
    least = int(case.weights[0, 3].argmin())
    assert case.weights[0, 3, least] < 1e-8
    page = open_report([case.layer], f"#token=3&pair={least}").page
    assert page.inner_text("#pair-title").endswith(" < 0.00001%")
    assert page.inner_text("#pair-place") == "rank 6 of the 6 keys of “\u2068w3\u2069”, < 0.001 × uniform attention"


def test_pointing_at_a_token_of_the_text_previews_the_pair(case: Any, open_report: Make) -> None:
    opened = open_report([case.layer], "#token=4&pair=0")
    page = opened.page
    page.locator(".token").nth(2).hover()
    assert "→ “\u2068=1+1\u2069”" in page.inner_text("#pair-title")
    assert page.evaluate("clearhead.state().pair") == 0
    page.mouse.move(0, 0)
    assert "→ “\u2068the\u2069”" in page.inner_text("#pair-title")


def test_on_a_phone_the_pair_stays_in_sight_and_opens(case: Any, open_report: Make) -> None:
    opened = open_report([case.layer], viewport={"width": 390, "height": 700})
    page = opened.page
    assert page.locator("#pair-title").is_visible() and not page.locator("#strongest").is_visible()
    for top in ("0", "document.documentElement.scrollHeight / 2"):
        page.evaluate(f"scrollTo(0, {top})")
        box = page.locator("#pair-title").bounding_box()
        assert box and 0 <= box["y"] < 700
    page.locator("#sheet").click()
    assert page.locator("#strongest").is_visible()
    opened.until("document.documentElement.scrollWidth <= innerWidth")


def test_on_a_phone_the_heads_come_first(case: Any, open_report: Make) -> None:
    opened = open_report([case.layer], viewport={"width": 390, "height": 844})
    page = opened.page
    tops = [page.locator(one).bounding_box()["y"] for one in ("#heads", "#reading", "#matrix")]
    assert tops == sorted(tops) and tops[1] < 500  # the text begins on the first screen
    assert page.locator(".head").nth(1).is_visible() and not page.locator("#sides").is_visible()
    page.get_by_role("button", name="more about the heads").click()
    assert page.locator("#sides").is_visible() and page.get_attribute("#more-heads", "aria-expanded") == "true"
    opened.until("document.documentElement.scrollWidth <= innerWidth")
    page.set_viewport_size({"width": 1280, "height": 844})
    opened.until(f"{ROOT}.getElementById('more-heads').checkVisibility()", False)


def test_of_a_long_text_the_map_is_saved_as_it_stands(make_case: Make, open_report: Make, tmp_path: Path) -> None:
    opened = open_report([make_case(1100, heads=1, features=2).layer])
    svg = ElementTree.fromstring(saved(opened, "map", tmp_path))
    (image,) = svg.iter("{http://www.w3.org/2000/svg}image")
    picture = opened.page.evaluate(f"{ROOT}.getElementById('map-picture').toDataURL()")
    assert image.get("href") == picture


def test_a_query_that_sees_nothing_moves_nothing(make_case: Make, open_report: Make) -> None:
    layer = make_case(4, heads=1, stop=[4, 4, 0, 4]).layer
    lengths = np.array([[1.0, 2.0, 0.5, 4.0]], dtype=np.float32)
    case = replace(layer, value_norms=lengths, transformed_norms=2 * lengths)
    opened = open_report([case], "#token=1&pair=3")
    weights = opened.page.evaluate("clearhead.look()") * lengths[0]
    share = f"{100 * weights[3] / weights.sum():.1f}% of the sum of all keys' lengths, rank "
    rank = 1 + int((weights > weights[3]).sum())
    assert opened.page.inner_text("#pair-moves") == (
        f"‖weight · value‖ = {weights[3]:.3g}, the length of what this key adds to the head's output: {share}{rank} by "
        f"length\n‖weight · value · W_O‖ = {2 * weights[3]:.3g}, the length of what it adds to the layer's result: "
        f"{share}{rank} by length"
    )
    opened.page.locator(".token").nth(2).click()
    opened.until("document.getElementById('clearhead').dataset.shown", "0/0/out/2/none")
    assert not opened.page.locator("#pair-moves").is_visible()


def test_what_a_key_receives_is_beside_uniform_attention(case: Any, open_report: Make) -> None:
    opened = open_report([case.layer], "#head=1&token=0")
    seen = np.tri(6)
    ratio = case.weights[1, :, 0].sum() / (seen / seen.sum(1, keepdims=True))[:, 0].sum()
    facts = opened.page.inner_text("#facts")
    share = re.search(r"(\S+)% of the head's attention", facts)  # of all rows, each 1
    assert share and float(share[1]) == pytest.approx(100 * case.weights[1, :, 0].sum() / 6, rel=0.01)
    said = re.search(r", (\S+) × its share under uniform attention", facts)
    assert said and float(said[1]) == pytest.approx(ratio, rel=0.06)
