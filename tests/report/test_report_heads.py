"""The pane of all heads: what it shows are the measures of `seen.table()`."""

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
from clearhead.inspection.measures import MEASURES

Make = Callable[..., Any]
SHOWN = "document.getElementById('clearhead').dataset.shown"
WORDS = ["the", "map", "said", "that", "the", "pump", "fell", "and", "the", "map", "was", "the", "map"]
RATIOS = ("distance", "weighted value norm", "weighted transformed norm")
NAMES = ("previous", "next", "itself", "first", "same word", "induction", "normalised entropy", "sink", *RATIOS)


class Looks(torch.nn.Module):
    """Three calls of three heads: one attends to the token before, one to itself, the others to nothing much."""

    def forward(self, x: Any) -> Any:
        back, weak = x.roll(-1, -2), 0.1 * x
        for keys in ((weak, back, x), (weak, weak, 0.3 * back), (0.2 * x, weak, weak)):
            F.scaled_dot_product_attention(x.expand(1, 3, -1, -1), torch.cat(keys, 1), x.expand(1, 3, -1, -1))
        return x


@pytest.fixture(scope="module")
def seen() -> Any:
    generator = torch.Generator().manual_seed(0)
    with ch.watch(model := Looks()) as seen:
        model(torch.randn(1, 1, len(WORDS), 24, generator=generator) * 2)
    return seen


@pytest.fixture(scope="module")
def html(seen: Any, tmp_path_factory: Any) -> str:
    path: Path = seen.view(tokens=WORDS).write(tmp_path_factory.mktemp("heads") / "page.html")
    return path.read_text()


def table_of(seen: Any) -> dict[str, Any]:
    """The rows of `seen.table()` by the names of their heads."""
    return {f"L{number // 3}H{row['head']}": row for number, row in enumerate(seen.table(tokens=WORDS))}


def with_measures(layer: Any, seed: int = 0, **more: Any) -> Any:
    rng = np.random.default_rng(seed)
    each = tuple(measured(previous=(v, 0.1), **{"normalised entropy": (1 - v, 1.0)}) for v in rng.random(layer.heads))
    return replace(layer, measures=each, **more)


def measured(**named: tuple[float, float]) -> Any:
    """A head's measures, by name: value, that of uniform attention."""
    by_name = {measure.name: measure for measure in MEASURES}
    return {by_name[name]: (*map(float, pair), None) for name, pair in named.items()}


def place(name: str) -> str:
    """L1H2 as in an address."""
    found = re.fullmatch(r"L(\d+)H(\d+)", name)
    assert found
    return f"{found[1]}/{found[2]}/"


def test_every_measure_of_every_head_is_that_of_the_table(seen: Any, html: str, open_report: Make) -> None:
    page = open_report([], html=html).page
    table = table_of(seen)
    options = page.locator("#measure option").evaluate_all("all => all.map(one => one.value)")
    assert tuple(options) == tuple(name for name in NAMES if name in table["L0H0"])
    for name in options:
        page.select_option("#measure", name)
        labels = page.locator(".head").evaluate_all("all => all.map(one => one.getAttribute('aria-label'))")
        ends = page.locator("#heads-ticks").inner_text()
        most = float(re.search(r"^(?:−|≤ 1/)([\d.]+)(?: ×)?", ends)[1])  # type: ignore[index]
        colours = page.locator(".head").evaluate_all("all => all.map(one => getComputedStyle(one).backgroundColor)")
        assert len(labels) == 9
        for (head, row), label, colour in zip(table.items(), labels, colours, strict=True):
            assert label.startswith(f"{head}, self, ")
            value, uniform = (
                float(x) for x in re.findall(r"(?<= )[\d.]+(?=%| positions|,|$)", label.split("self, ")[1])
            )
            scale = 1 if name in RATIOS else 100
            for shown, exact in ((value, row[name]), (uniform, row[f"{name} uniform"])):
                assert shown == pytest.approx(
                    scale * exact, rel=6e-3, abs=0.5 if exact > 0.01 and scale == 100 else 0.05
                )
            apart = row[name] - row[f"{name} uniform"]
            red, _, blue = (float(x) for x in re.findall(r"[\d.]+", colour)[:3])
            share = np.log2(row[name] / row[f"{name} uniform"]) / np.log2(most) if scale == 1 else 100 * apart / most
            assert abs(share) <= 1 or most == 64  # "≥ 64 ×"
            if abs(share) > 0.04:
                assert (blue > red) == (apart > 0)
        assert page.inner_text("#measure-says")
        page.locator("summary").filter(has_text="formula").click()
        assert (
            "Σ" in page.inner_text("#measure-formula")
            or "mean_i" in page.inner_text("#measure-formula")
            or name == "sink"
        )
        page.locator("summary").filter(has_text="formula").click()


def test_it_opens_on_the_most_distinctive_head_with_its_sentence(seen: Any, html: str, open_report: Make) -> None:
    opened = open_report([], html=html)
    most = seen.distinctive(WORDS)
    assert opened.shown.startswith(f"{most.layer}/{most.head}/")
    assert opened.page.inner_text("#distinctive") == str(most)
    opened.page.locator(".head").last.click()
    opened.until(f"{SHOWN}.slice(0, 4)", "2/2/")
    name = f"L{most.layer}H{most.head}"
    said = opened.page.inner_text("#distinctive")  # of another head the sentence is not said
    assert said == f"Go to {name}, which is furthest from uniform attention"
    opened.page.click("#distinctive")
    opened.until(f"{SHOWN}.slice(0, 4)", f"{most.layer}/{most.head}/")
    assert opened.page.inner_text("#distinctive") == str(most)
    opened.page.keyboard.press("m")  # the simple view says it of effects alone
    opened.until("document.getElementById('clearhead').hasAttribute('data-simple')")
    assert opened.page.is_hidden("#distinctive") and opened.page.is_visible("#five-title")


RAMP = """canvas => {
    const copy = Object.assign(document.createElement("canvas"), { width: canvas.width, height: 1 });
    copy.getContext("2d").drawImage(canvas, 0, 0);
    const pixels = copy.getContext("2d").getImageData(0, 0, canvas.width, 1).data;
    return [0, 128, canvas.width - 1].map((at) => Array.from(pixels.slice(4 * at, 4 * at + 3)));
}"""


def test_a_measure_on_one_side_of_uniform_attention_has_one_half_of_the_colours(html: str, open_report: Make) -> None:
    page = open_report([], "#by=normalised%20entropy", html=html).page
    ticks = page.locator("#heads-ticks span").all_inner_texts()
    assert len(ticks) == 2 and ticks[0].startswith("−") and ticks[1].endswith("uniform attention")
    left, middle, right = page.locator("#heads-ramp").evaluate(RAMP)
    assert left[0] > left[2] + 40 and middle[0] > middle[2] + 40 and min(right) > 240
    page.select_option("#measure", "previous")
    assert len(page.locator("#heads-ticks span").all_inner_texts()) == 3
    left, middle, right = page.locator("#heads-ramp").evaluate(RAMP)
    assert left[0] > left[2] + 40 and min(middle) > 240 and right[2] > right[0] + 40


def test_a_near_uniform_model_says_so(open_report: Make, tmp_path: Path) -> None:
    with ch.watch(model := Looks()) as seen:
        model(1e-3 * torch.randn(1, 1, 20, 8, generator=torch.Generator().manual_seed(0)))
    opened = open_report([], html=seen.view().write(tmp_path / "page.html").read_text())
    opened.page.locator(".head").last.click()
    opened.until(f"{SHOWN}.slice(0, 4)", "2/2/")
    assert opened.page.inner_text("#distinctive").startswith("All 9 heads are near uniform")  # said of all of them
    assert opened.page.locator("#five button").count() == 0
    assert opened.page.is_hidden("#five-title")


def test_the_most_distinctive_are_of_other_heads(seen: Any, html: str, open_report: Make) -> None:
    opened = open_report([], html=html)
    page = opened.page
    names = page.locator("#five button").all_inner_texts()
    table = table_of(seen)
    heads, measures = zip(*(re.match(r"(\S+) (.+) \S+%$", name).groups() for name in names), strict=True)  # type: ignore[union-attr]
    assert 1 < len(names) <= 5 and len(set(heads)) == len(heads)
    apart = [
        table[head][measure] - table[head][f"{measure} uniform"] for head, measure in zip(heads, measures, strict=True)
    ]
    assert apart == sorted(apart, reverse=True) and min(apart) >= 0.05
    shares = [m for m in NAMES if m not in (*RATIOS, "normalised entropy")]
    assert apart[0] == pytest.approx(max(row[m] - row[f"{m} uniform"] for row in table.values() for m in shares))
    for head, by in zip(heads, apart, strict=True):  # each by the measure by which it departs most
        most = max(table[head][m] - table[head][f"{m} uniform"] for m in shares)
        assert by == pytest.approx(most, abs=1e-4), head  # a sink that is the first token goes by that name
    page.locator("#five button").last.click()
    opened.until(f"{SHOWN}.slice(0, 4)", place(heads[-1]))
    assert page.input_value("#measure") == measures[-1]


def test_a_measure_says_over_how_many_queries_it_is_and_few_name_no_head(make_case: Make, open_report: Make) -> None:
    layer = make_case(9, heads=3).layer
    each = tuple({m: (0.9, 0.1, None, n) for m in MEASURES if m.name == "induction"} for n in (1, 4, 5))
    page = open_report([replace(layer, measures=each)]).page
    labels = page.locator(".head").evaluate_all("all => all.map(one => one.getAttribute('aria-label'))")
    said = [f"90%; uniform attention: 10%, over {n}" for n in ("1 query", "4 queries", "5 queries")]
    assert [label.split("induction ")[1] for label in labels] == said
    assert page.locator("#five button").all_inner_texts() == ["L0H2 induction 90%"]


def test_the_matrix_by_keyboard(html: str, open_report: Make) -> None:
    opened = open_report([], "#layer=0&head=0&token=2", html=html)
    page = opened.page
    names = page.locator(".head").evaluate_all("all => all.map(one => one.getAttribute('aria-label').split(',')[0])")
    assert names == [f"L{layer}H{head}" for layer in range(3) for head in range(3)]
    cell = page.locator(".head[tabindex='0']")
    assert cell.count() == 1
    cell.focus()
    focused = "document.getElementById('clearhead').shadowRoot.activeElement.getAttribute('aria-label').split(',')[0]"
    for key, name in (
        ("ArrowRight", "L0H1"),
        ("ArrowDown", "L1H1"),
        ("ArrowLeft", "L1H0"),
        ("End", "L2H2"),
        ("ArrowUp", "L1H2"),
    ):
        page.keyboard.press(key)
        assert page.evaluate(focused) == name
    assert opened.shown.startswith("0/0/")
    page.keyboard.press("Enter")
    opened.until(f"{SHOWN}.slice(0, 4)", "1/2/")
    assert page.locator(".head[aria-current]").get_attribute("aria-label").startswith("L1H2,")
    page.keyboard.press("p")
    opened.until("location.hash.includes('pins=1.2')")
    assert "pinned" in page.locator(".head[aria-current]").get_attribute("aria-label")
    assert page.evaluate(focused) == "L1H2"


def test_a_filter_dims_the_others_and_counts(html: str, make_case: Make, open_report: Make) -> None:
    page = open_report([], html=html).page
    shown = ".head:not(.dim)"
    for typed, count in (
        ("L1", 3),
        ("h2", 3),
        ("L1H2", 1),
        ("L1 H2", 1),
        ("looks", 9),
        ("cross", 0),
        ("l", 9),
        ("", 9),
    ):
        page.fill("#only", typed)
        for _ in range(50):
            if page.locator(shown).count() == count:
                break
            page.wait_for_timeout(20)
        assert page.locator(shown).count() == count, typed
        assert page.inner_text("#only-count") == (f"{count} of 9 heads" if typed else "")
    layers = [make_case(4, heads=2, name=f"h.{n}.attn.{n}").layer for n in range(12)]
    opened = open_report(layers, "#only=attn.1")
    assert opened.page.inner_text("#only-count") == "6 of 24 heads"  # attn.1, attn.10 and attn.11
    assert opened.page.input_value("#only") == "attn.1"


def test_pins_stand_in_the_address_and_back_takes_them_away(html: str, open_report: Make) -> None:
    opened = open_report([], "#layer=0&head=1&token=2&pins=2.0_1.1_9.9_x", html=html)
    page = opened.page
    opened.until("location.hash", "#layer=0&head=1&token=2&pins=2.0_1.1&all=1")
    assert [chip.replace("×", "").strip() for chip in page.locator(".pin").all_inner_texts()] == ["L2H0", "L1H1"]
    page.click("#pin")
    opened.until("location.hash", "#layer=0&head=1&token=2&pins=2.0_1.1_0.1&all=1")
    assert page.inner_text("#pin") == "Unpin L0H1" and page.locator(".head.pinned").count() == 3
    page.get_by_label("unpin L1H1").click()
    opened.until("location.hash", "#layer=0&head=1&token=2&pins=2.0_0.1&all=1")
    page.evaluate("history.back()")
    opened.until("location.hash", "#layer=0&head=1&token=2&pins=2.0_1.1_0.1&all=1")
    assert page.locator(".pin").count() == 3
    page.get_by_role("button", name="L2H0", exact=True).click()
    opened.until(f"{SHOWN}.slice(0, 4)", "2/0/")


def test_the_scatter_has_a_point_for_each_head_where_its_measures_are(seen: Any, html: str, open_report: Make) -> None:
    opened = open_report([], "#by=previous&against=distance&show=scatter&layer=0&head=0&token=2", html=html)
    page = opened.page
    dots = page.locator(".dot").evaluate_all(
        "all => all.map(one => [one.getAttribute('aria-label').split(':')[0],"
        "parseFloat(one.style.left), parseFloat(one.style.bottom)])"
    )
    table = table_of(seen)
    assert len(dots) == 9
    assert [name for name, _, _ in dots] == sorted(table, key=lambda name: table[name]["previous"])
    assert page.inner_text("#x-axis").split("\n")[1] == "previous token"
    right = float(page.inner_text("#x-axis").split("\n")[2].rstrip("%")) / 100
    top = float(page.inner_text("#y-axis").split("\n")[-1].split()[0])
    for name, x, y in dots:
        assert x == pytest.approx(100 * table[name]["previous"] / right, abs=0.01)
        assert y == pytest.approx(100 * table[name]["distance"] / top, abs=0.01)
        assert 0 <= x <= 100 and 0 <= y <= 100
    page.locator(".dot[tabindex='0']").focus()
    page.keyboard.press("Home")
    assert page.inner_text("#point-name").startswith(f"{dots[0][0]}: previous token ")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#point-name").startswith(f"{dots[1][0]}: ")
    page.keyboard.press("Enter")
    opened.until(f"{SHOWN}.slice(0, 4)", place(dots[1][0]))
    page.select_option("#against", "sink")
    opened.until("location.hash.includes('against=sink')")
    page.evaluate("history.back()")
    opened.until("location.hash.includes('against=distance')")


def test_the_list_is_in_order_and_grows(make_case: Make, open_report: Make) -> None:
    layers = [with_measures(make_case(3, heads=30, features=2, name=f"{n}").layer, n) for n in range(9)]
    page = open_report(layers, "#show=list&by=previous").page
    rows = page.locator(".ranked .share")
    assert rows.count() == 200
    page.get_by_role("button", name="70 more of 70").click()
    assert rows.count() == 270
    shown = [float(x.rstrip("%")) for x in rows.all_inner_texts()]
    assert shown == sorted(shown, reverse=True)
    page.select_option("#measure", "normalised entropy")
    shown = [float(x.rstrip("%")) for x in rows.all_inner_texts()]
    assert shown == sorted(shown) and len(shown) == 270


def test_what_is_not_known_is_no_number(make_case: Make, open_report: Make) -> None:
    layer = make_case(4, heads=2).layer
    layer = replace(layer, measures=(measured(previous=(0.5, 0.1)), measured(previous=(np.nan, np.nan))))
    page = open_report([layer], "#head=1").page
    assert page.locator(".head.unknown").count() == 1
    assert page.inner_text("#measure-here") == "L0H1: previous token –, not known"
    bare = open_report([make_case(4, heads=2).layer], "#show=list").page
    assert bare.locator(".ranked .share").all_inner_texts() == ["–", "–"]
    assert bare.is_hidden("#distinctive") and bare.is_hidden("#measure-here")


def test_a_small_map_is_shown_beside_the_matrix(make_case: Make, open_report: Make) -> None:
    case = make_case(8, heads=3, stop=np.arange(8) + 1)
    for width in (390, 800, 1280):
        opened = open_report([with_measures(case.layer)], viewport={"width": width, "height": 900})
        page = opened.page
        assert page.is_hidden("#preview")
        page.locator(".head").nth(1).hover()
        assert page.is_visible("#preview") and "L0H1" in page.inner_text("#preview")
        inner, outer = (page.locator(one).bounding_box() for one in ("#preview", "#heads"))
        apart = inner["x"] >= outer["x"] + outer["width"] or inner["x"] + inner["width"] <= outer["x"]
        assert apart or inner["y"] >= outer["y"] + outer["height"], width
        assert 0 <= inner["x"] and inner["x"] + inner["width"] <= width
        page.mouse.move(1, 1)
        assert page.is_hidden("#preview")
    page.locator(".head[tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#preview")
    page.keyboard.press("Escape")
    assert page.is_hidden("#preview")


PIXELS = """canvas => {
    const copy = Object.assign(document.createElement("canvas"), { width: 8, height: 8 });
    copy.getContext("2d").drawImage(canvas, 0, 0);
    return Array.from(copy.getContext("2d").getImageData(0, 0, 8, 8).data);
}"""


def test_small_maps_stand_in_the_matrix_on_demand(make_case: Make, open_report: Make) -> None:
    case = make_case(8, heads=3, stop=np.arange(8) + 1)
    ratios = np.where(np.tri(8) > 0, case.weights * np.arange(1, 9)[:, None], -1)
    opened = open_report([replace(case.layer, thumbnail=ratios)], "#show=maps")
    page = opened.page
    page.wait_for_timeout(300)
    pixels = np.array([page.locator(".head canvas").nth(h).evaluate(PIXELS) for h in range(3)]).reshape(3, 8, 8, 4)
    masked = ~np.tri(8).astype(bool)
    grey = pixels[0, 0, 7, :3]
    assert (pixels[:, masked][..., :3] == grey).all()
    assert not (pixels[:, ~masked][..., :3] == grey).all(-1).any()
    page.locator("#heads-as input[value=squares]").check(force=True)
    opened.until("location.hash.includes('show')", False)
    assert page.locator(".head canvas").count() == 0


def contrast(one: Any, other: Any) -> float:
    def light(colour: str) -> float:
        parts = np.array([float(x) for x in re.findall(r"[\d.]+", colour)[:3]]) / 255
        return float(
            [0.2126, 0.7152, 0.0722] @ np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        )

    low, high = sorted([light(one), light(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_marks_stand_out_on_every_colour(make_case: Make, open_report: Make, scheme: Any) -> None:
    layer = make_case(4, heads=30, features=2).layer
    each = tuple(measured(previous=(n / 29, 0.5), **{"normalised entropy": (0.5, 1.0)}) for n in range(30))
    pins = "_".join(f"0.{n}" for n in range(30))
    page = open_report([replace(layer, measures=each)], f"#pins={pins}&head=3", color_scheme=scheme).page
    of = "one => [getComputedStyle(one).backgroundColor, getComputedStyle(one, '::after').backgroundColor]"
    pairs = page.locator(".head").evaluate_all(f"all => all.map({of})")
    assert len({cell for cell, _ in pairs}) > 20
    assert min(contrast(*pair) for pair in pairs) >= 3
    styles = "one => [getComputedStyle(one).outlineColor, getComputedStyle(one).boxShadow]"
    ring, between = page.locator(".head[aria-current]").evaluate(styles)
    assert contrast(ring, between) >= 3
    page.locator("#heads-as input[value=scatter]").check(force=True)
    panel = page.locator("#overview").evaluate("one => getComputedStyle(one).backgroundColor")
    page.evaluate("location.hash = '#show=scatter'")
    page.wait_for_selector(".dot:not(.pinned)")
    dots = page.locator(".dot").evaluate_all("all => all.map(one => getComputedStyle(one).backgroundColor)")
    assert min(contrast(dot, panel) for dot in dots) >= 3


def test_hostile_names_stay_text(make_case: Make, open_report: Make) -> None:
    bad = "</script><img src=x onerror=alert(1)>"
    layers = [with_measures(make_case(3, heads=2, name=f"{bad}{n}").layer, label=bad) for n in range(2)]
    opened = open_report(layers, f"#pins=0.0_1.1&only={bad}&a=0.0&b=1.1&by={bad}")
    page = opened.page
    for show in ("maps", "list", "scatter", "squares"):
        page.locator(f"#heads-as input[value={show}]").check(force=True)
        page.wait_for_timeout(60)
        assert page.locator("#overview img, #compare img").count() == 0
    page.locator(".head").first.hover()
    assert bad in page.inner_text("#preview")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
