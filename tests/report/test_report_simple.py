"""The simple view on which a page opens, "More", which shows the rest, and the words that "?" explains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rendered import page_of

from clearhead.base.errors import UnsupportedError
from clearhead.inspection.measures import MEASURES
from clearhead.report.layer import LeftOut

Make = Callable[..., Any]
ROOT = "document.getElementById('clearhead').shadowRoot"
BOTH = ("#texts", "#map", "#strongest", "#layer", "#head", "#legend")
REST = ("#heads", "#measure", "#facts", "#why", "#everywhere", "#scales", "#shows", "#colours", "#lines", "#map-note")


@pytest.fixture
def cases(make_case: Make) -> list[Any]:
    """Two layers, of two heads and of three."""
    return [make_case(6, heads=2), make_case(6, heads=3, seed=1, name="encoder.layer.1.attention")]


def layers_of(cases: list[Any]) -> list[Any]:
    return [case.layer for case in cases]


def seen_of(page: Any, names: tuple[str, ...]) -> list[bool]:
    return [page.locator(name).is_visible() for name in names]


def part(opened: Any, name: str) -> Any:
    return opened.page.evaluate(f"new URLSearchParams(location.hash.slice(1)).get('{name}')")


def is_whole(page: Any) -> bool:
    seen = seen_of(page, REST)
    assert seen == len(seen) * [seen[0]], "a part of the rest is shown"
    assert seen_of(page, BOTH) == len(BOTH) * [True]
    assert page.inner_text("#all") == ("Less" if seen[0] else "More")
    assert page.get_attribute("#all", "aria-expanded") == str(seen[0]).lower()
    return seen[0]


def test_a_page_opens_simple_and_more_is_kept_in_the_address(cases: Any, open_report: Make) -> None:
    opened = open_report(layers_of(cases), simple=True)
    page = opened.page
    assert not is_whole(page) and page.locator("#start").is_visible() and part(opened, "all") is None
    assert page.get_by_role("heading", level=2, name="All 5 heads").count() == 1  # for readers who hear the page
    page.locator("#all").focus()
    page.keyboard.press("Enter")
    opened.until("new URLSearchParams(location.hash.slice(1)).get('all')", "1")
    opened.settle()
    assert is_whole(page) and not page.locator("#start").is_visible()
    assert page.evaluate(f"{ROOT}.activeElement.id") == "all"
    square = page.locator(".head").first.bounding_box()
    assert square and square["width"] > 10  # the squares have the room that they had not while they were hidden
    page.reload()
    opened.settle()
    assert is_whole(page)
    page.keyboard.press("m")
    opened.until("new URLSearchParams(location.hash.slice(1)).get('all')", "0")
    assert not is_whole(page)
    page.evaluate("history.back()")
    opened.until("new URLSearchParams(location.hash.slice(1)).get('all')", "1")
    assert is_whole(page)


@pytest.mark.parametrize(
    ("address", "whole"),
    [
        ("#layer=1&head=2&token=3&pair=0&view=in&scale=log", False),
        ("#layer=1&head=2&arcs=1&zoom=0.3.0.3&tokens=1-2", False),
        ("#pins=0.1_1.2", True),
        ("#a=0.0&b=0.1", True),
        ("#lines=3", True),
        ("#only=H1", True),
        ("#show=list", True),
        ("#show=list&all=0", False),
        ("#all=yes", False),
    ],
)
def test_an_address_from_before_shows_what_it_names(cases: Any, open_report: Make, address: str, whole: bool) -> None:
    opened = open_report(layers_of(cases), address, simple=True)
    assert opened.page.locator("#heads-as").is_visible() == whole
    named = dict(one.split("=") for one in address[1:].split("&"))
    for name in named.keys() - {"all"}:
        assert part(opened, name) == named[name], name


def test_what_only_the_whole_page_shows_opens_it(cases: Any, open_report: Make) -> None:
    opened = open_report(layers_of(cases), simple=True)
    press = "e => e.dispatchEvent(new KeyboardEvent('keydown', {key: 'a', bubbles: true}))"
    opened.page.locator("#start").evaluate(press)
    opened.until("new URLSearchParams(location.hash.slice(1)).get('all')", "1")
    assert part(opened, "a") == "0.0" and is_whole(opened.page)


def test_layer_and_head_are_chosen_above(cases: Any, open_report: Make) -> None:
    opened = open_report(layers_of(cases), "#token=4", simple=True)
    page = opened.page
    assert page.locator("#layer option").all_inner_texts() == ["L0", "L1"]
    assert page.locator("#head option").all_inner_texts() == ["H0", "H1"]
    page.select_option("#layer", "L1")
    opened.until("document.getElementById('clearhead').dataset.shown.slice(0, 2)", "1/")
    assert page.locator("#head option").all_inner_texts() == ["H0", "H1", "H2"]
    page.locator("#head").focus()
    page.keyboard.press("End")
    opened.until("document.getElementById('clearhead').dataset.shown.slice(0, 10)", "1/2/out/4/")
    np.testing.assert_allclose(page.evaluate("clearhead.look()"), cases[1].weights[2, 4], atol=1e-4)
    page.select_option("#layer", "L0")  # which has no head 2
    opened.until("document.getElementById('clearhead').dataset.shown.slice(0, 10)", "0/1/out/4/")
    assert page.input_value("#head") == "1" and page.inner_text("#where").startswith("L0H1 · encoder.layer.0.")


def test_arcs_are_drawn_in_the_simple_view_unless_turned_off(cases: Any, open_report: Make) -> None:
    opened = open_report(layers_of(cases), "#token=4", simple=True)
    page = opened.page
    arcs = f"{ROOT}.querySelectorAll('.arcs path').length"
    row = np.sort(cases[0].weights[0, 4])[::-1][:5]
    drawn = int((row >= row[0] / 100).sum())
    opened.until(arcs, drawn)
    assert part(opened, "arcs") is None and page.get_attribute("#arcs", "aria-pressed") == "true"
    page.locator("#arcs").click()
    opened.until(arcs, 0)
    assert part(opened, "arcs") == "0"
    page.locator("#arcs").click()
    opened.until(arcs, drawn)
    assert part(opened, "arcs") is None
    page.locator("#all").click()
    opened.until(arcs, 0)  # of the whole page as before
    page.locator("#arcs").click()
    opened.until(arcs, drawn)
    assert part(opened, "arcs") == "1"


def test_a_head_that_stands_out_is_one_click_away(cases: Any, open_report: Make) -> None:
    measure = next(one for one in MEASURES if one.name == "previous")
    layer = replace(cases[1].layer, measures=tuple({measure: (v, 0.1, None)} for v in (0.2, 0.4, 0.9)))
    opened = open_report([cases[0].layer, layer], simple=True)
    page = opened.page
    button = page.locator("#five button")
    assert button.count() == 3 and button.first.inner_text().startswith("L1H2 previous 90")
    button.first.click()
    opened.until("document.getElementById('clearhead').dataset.shown.slice(0, 3)", "1/2")
    assert part(opened, "layer") == "1" and part(opened, "by") is None and not is_whole(page)


def test_a_page_opens_on_a_named_head(cases: Any, open_report: Make) -> None:
    page = page_of([LeftOut("gone", "It has no steps."), *layers_of(cases)], "A report")
    page.distinctive = {"layer": 0, "head": 1, "sentence": "", "measure": "previous", "nearUniform": False}
    page.open_on("L1", 2)
    html = "".join(page.parts())
    opened = open_report([], html=html, simple=True)
    assert opened.shown.startswith("1/2/")
    np.testing.assert_allclose(
        opened.page.evaluate("clearhead.look()"), cases[1].weights[2, int(part(opened, "token"))], atol=1e-4
    )
    assert open_report([], "#layer=0&head=1", html=html, simple=True).shown.startswith("0/1/")
    with pytest.raises(UnsupportedError, match=r"cannot open on L7, which is not shown\. gone: It has no steps\."):
        page.open_on("L7", 0)


def test_the_focus_is_not_lost_where_the_simple_view_hides_it(cases: Any, open_report: Make) -> None:
    opened = open_report(layers_of(cases))
    page = opened.page
    page.locator("#scales input").first.focus()
    page.keyboard.press("m")
    opened.until("new URLSearchParams(location.hash.slice(1)).get('all')", "0")
    assert page.evaluate(f"{ROOT}.activeElement.id") == "all"
    page.locator("#head").focus()  # which both views show
    page.evaluate("location.hash = location.hash.replace('all=0', 'all=1')")
    opened.until(f"{ROOT}.getElementById('scales').checkVisibility()")
    assert page.evaluate(f"{ROOT}.activeElement.id") == "head"
