"""Lines: two columns of tokens, and the strongest keys of each query between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Make = Callable[..., Any]

ROOT = "document.getElementById('clearhead').shadowRoot"
PAIRS = f"Array.from({ROOT}.querySelectorAll('#lines-picture path'), e => e.dataset.pair)"
OWN = f"Array.from({ROOT}.querySelectorAll('#lines-picture path.own'), e => e.dataset.pair)"


def drawn(opened: Any) -> set[tuple[int, int]]:
    """The pairs that have a line."""
    pairs = opened.page.evaluate(PAIRS)
    assert len(pairs) == len(set(pairs))
    return {(int(i), int(j)) for i, j in (pair.split("/") for pair in pairs)}


def strongest(weights: Any, k: int) -> set[tuple[int, int]]:
    """The k largest weights above 0 of each query."""
    order = np.argsort(-weights, axis=1, kind="stable")[:, :k]
    return {(i, int(j)) for i, row in enumerate(order) for j in row if weights[i, j] > 0}


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_lines_are_the_strongest_of_each_query(make_case: Make, open_report: Make, k: int, causal: bool) -> None:
    case = make_case(30, heads=1, stop=np.arange(30) + 1 if causal else None)
    opened = open_report([case.layer], f"#token=7&lines={k}")
    wanted = strongest(case.weights[0], k)
    assert drawn(opened) == wanted
    widths = opened.page.evaluate(f"""Object.fromEntries(Array.from({ROOT}.querySelectorAll('#lines-picture path'),
        e => [e.dataset.pair, Number(e.getAttribute('stroke-width'))]))""")
    for i, j in wanted:
        least = 1.5 if i == 7 else 0.5  # those of the chosen token stand out
        assert widths[f"{i}/{j}"] == pytest.approx(least + 4.5 * case.weights[0, i, j], abs=0.006)
    assert {pair.split("/")[0] for pair in opened.page.evaluate(OWN)} == {"7"}
    labels = opened.page.locator("#lines-picture text.end .weight").all_text_contents()
    top = np.sort([case.weights[0, i, j] for i, j in wanted if i == 7])
    np.testing.assert_allclose(np.sort([float(label.strip(" %")) for label in labels]), 100 * top, rtol=0.05)


def test_closed_until_asked_for(make_case: Make, open_report: Make) -> None:
    case = make_case(9, heads=2)
    opened = open_report([case.layer], "#token=4")
    page = opened.page
    assert page.locator("#lines-box").is_hidden() and page.evaluate(PAIRS) == []
    assert "lines=" not in page.evaluate("location.hash")
    page.locator("#lines summary").focus()
    page.keyboard.press("Enter")
    opened.until(f"{PAIRS}.length", 27)
    assert "lines=3" in page.evaluate("location.hash")
    page.get_by_label("lines of each query").select_option("5")
    opened.until(f"{PAIRS}.length", 45)
    link = page.evaluate("location.hash")
    assert "lines=5" in link
    page.locator("#lines summary").click()
    opened.until("location.hash.includes('lines')", False)
    page.evaluate("history.back()")
    opened.until("location.hash.includes('lines=5')")
    opened.until(f"{ROOT}.getElementById('lines').open")
    again = open_report([case.layer], link)
    assert drawn(again) == strongest(case.weights[0], 5)
    for bad in ("0", "6", "x"):
        assert open_report([case.layer], f"#lines={bad}").page.locator("#lines-box").is_hidden()


def test_a_token_pointed_at_has_its_lines_alone(make_case: Make, open_report: Make) -> None:
    case = make_case(12, heads=1)
    opened = open_report([case.layer], "#token=4&lines=2")
    page = opened.page
    every = strongest(case.weights[0], 2)
    assert drawn(opened) == every
    page.locator("#lines-picture g.i").nth(8).hover()
    opened.until(f"{PAIRS}.every(p => p.startsWith('8/'))")
    assert drawn(opened) == {pair for pair in every if pair[0] == 8}
    assert page.locator(".token.passing").all_inner_texts() == ["w8"]  # in the text too
    key = next(j for _, j in sorted(every))
    page.locator("#lines-picture g.j").nth(key).hover()
    opened.until(f"{PAIRS}.every(p => p.endsWith('/{key}'))")
    assert drawn(opened) == {pair for pair in every if pair[1] == key}
    page.mouse.move(0, 0)
    opened.until(f"{PAIRS}.length", 24)


def test_a_click_chooses_a_query_or_a_key(make_case: Make, open_report: Make) -> None:
    case = make_case(5, 4, kind="cross", heads=1, key_tokens=["it", "is", "wet", "."])
    opened = open_report([case.layer], "#token=1&lines=2")
    page = opened.page
    page.locator("#lines-picture g.j").nth(2).click()
    opened.until("clearhead.state().view + clearhead.state().token", "in2")
    own = {pair for pair in strongest(case.weights[0], 2) if pair[1] == 2}
    assert {tuple(map(int, pair.split("/"))) for pair in page.evaluate(OWN)} == own
    page.locator("#lines-picture g.i").nth(3).click()
    opened.until("clearhead.state().view + clearhead.state().token", "out3")


def test_by_keyboard(make_case: Make, open_report: Make) -> None:
    opened = open_report([make_case(6, heads=1).layer], "#token=2&lines=1")
    page = opened.page
    box = page.locator("#lines-box")
    assert "6 queries left, 6 keys right" in (box.get_attribute("aria-label") or "")
    box.focus()
    for key, shown in [
        ("ArrowDown", "out3"), ("End", "out5"), ("ArrowDown", "out5"), ("ArrowRight", "in5"), ("ArrowUp", "in4"),
        ("ArrowLeft", "out4"), ("Home", "out0"),
    ]:  # fmt: skip
        page.keyboard.press(key)
        opened.until("clearhead.state().view + clearhead.state().token", shown)
    assert page.evaluate(f"{ROOT}.activeElement.id") == "lines-box"


def test_100_tokens_at_full_height_and_more_in_a_box(make_case: Make, open_report: Make) -> None:
    opened = open_report([make_case(100, heads=1).layer], "#lines=2")
    page = opened.page
    assert page.locator("#lines-picture g.i").count() == 100
    boxes = page.evaluate(
        f"Array.from({ROOT}.querySelectorAll('#lines-picture g.i'), e => e.getBoundingClientRect().top)"
    )
    assert np.diff(boxes).min() >= 14
    case = make_case(900, heads=1, features=4)
    opened = open_report([case.layer], "#token=450&lines=2")
    opened.until(f"{ROOT}.querySelectorAll('#lines-picture path').length > 20")
    page = opened.page
    wanted = strongest(case.weights[0], 2)

    def queries() -> set[int]:
        found = drawn(opened)
        rows = {i for i, _ in found}
        assert found == {pair for pair in wanted if pair[0] in rows}
        return rows

    assert 450 in queries() and len(queries()) < 80
    assert page.locator("#lines-picture *").count() < 1200
    page.locator("#lines-box").evaluate("e => { e.scrollTop = 0; }")
    opened.until(f"{PAIRS}.some(p => p.startsWith('0/'))")
    assert queries() >= {0, 1, 2, 450}  # the chosen one's are drawn wherever it is
    page.locator("#lines-box").focus()
    page.keyboard.press("ArrowDown")
    opened.until("clearhead.state().token", 451)
    opened.until(f"{PAIRS}.some(p => p.startsWith('449/'))")  # it has come into sight again
