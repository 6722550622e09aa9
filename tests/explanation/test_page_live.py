"""Below the inputs the page shows the weights and the output as they are now."""

import pytest
import torch
from drawn import draw
from opened_page import cell, heads, open_step, small

import clearhead as ch

LIVE = "#cards .card:not([hidden]) .live"


def shown(opened):
    """The numbers of the tables below the inputs, as texts."""
    read = "(live) => Array.from(document.querySelectorAll(`${live} tbody tr`), (row) => row.innerText.split(/\\s+/))"
    return opened.page.evaluate(read, LIVE)


def test_they_follow_a_change_of_an_input(show):
    opened = show(small())
    assert opened.page.locator(f"{LIVE} figcaption b").all_inner_texts() == ["weights", "output"]
    before = shown(opened)
    cell(opened, "query", 0, 0).click()
    opened.page.keyboard.type("3")
    opened.page.keyboard.press("Enter")
    changed, after = draw(3, 4), shown(opened)
    changed[0, 0] = 3.0
    explanation = ch.explain(changed, draw(4, 4, seed=1), draw(4, 2, seed=2))
    assert after[0] != before[0] and after[1:3] == before[1:3]
    wanted = torch.cat([explanation["weights"].flatten(), explanation["output"].flatten()])
    numbers = [float(text) for row in after for text in row[2:]]  # after the name of the query
    torch.testing.assert_close(torch.tensor(numbers), wanted, atol=6e-5, rtol=1e-3)
    opened.page.locator(f"{LIVE} td.cell").first.click()
    assert opened.page.inner_text("#written").startswith("weights[0, 0] = ")


def test_they_are_those_of_the_chosen_head_and_stand_below_every_input(show):
    opened = show(heads())
    first = shown(opened)
    opened.page.locator("#heads input").nth(1).check(force=True)
    assert shown(opened) != first
    open_step(opened, "scores")
    assert opened.page.locator(LIVE).count() == 0
    opened.page.click("#view")
    assert not opened.page.locator(".live").first.is_visible()  # all steps are shown


def test_there_are_none_where_no_input_can_be_changed(show):
    long = ch.explain(draw(4, 8), draw(200, 8, seed=1), draw(200, 4, seed=2))
    assert show(long).page.locator(".live").count() == 0
    positions = ch.explain(ch.nn.SinusoidalPositionalEncoding(4), draw(1, 3, 4))
    assert show(positions).page.locator(".live").count() == 0


def test_no_bar_stays_in_sight_for_a_plain_input(show):
    opened = show(small())
    position = "getComputedStyle(document.querySelector('#below')).position"
    assert opened.page.evaluate(position) == "static"
    cell(opened, "query", 0, 0).click()
    opened.page.keyboard.type("x")
    opened.page.keyboard.press("Enter")
    assert opened.page.evaluate(position) == ("sticky" if opened.page.inner_text("#said") else "static")
    opened.page.keyboard.press("Escape")
    open_step(opened, "weights")
    assert opened.page.evaluate(position) == "sticky"


@pytest.mark.parametrize("width", [343, 390])
def test_four_columns_fit_a_phone(show, width):
    words = ["animal", "tired", "street", "was"]
    x = draw(4, 4)
    opened = show(ch.explain(x, x, x, tokens=words, mask=ch.Causal()), viewport={"width": width, "height": 700})
    for step in ("query", "products", "masked", "weights", "output"):
        open_step(opened, step)
        cut = "Array.from(document.querySelectorAll('.scroller')).filter((x) => x.scrollWidth > x.clientWidth).length"
        assert opened.page.evaluate(cut) == 0, step


def test_a_cell_of_a_mask_is_written_as_a_claim(show):
    explanation = small(mask=ch.Lengths([2]))
    opened = show(explanation)
    open_step(opened, "mask")
    said = opened.page.inner_text("#written .sentence")
    assert said == "mask[0, 0]: 0 < 2 is True" and said in str(explanation)
    cell(opened, "mask", 0, 3).click()
    assert opened.page.inner_text("#written .sentence") == "mask[0, 3]: 3 < 2 is False"
