"""What a reader does on an explanation's page, and how it looks."""

import dataclasses

import pytest
import torch
from drawn import draw
from opened_page import EXAMPLES, HOSTILE, LUMINANCE, TEXTS, cell, edit, fits, heads, numbers, same, small

import clearhead as ch
from clearhead.base.symbolic.steps import number


def test_steps_by_keys_buttons_and_links(show):
    opened = show(small())
    page, count = opened.page, opened.page.locator("#count")
    assert count.inner_text() == "step 1 of 9"
    for key, wanted in (("j", 2), ("ArrowRight", 3), ("k", 2), ("ArrowLeft", 1), ("ArrowLeft", 1), ("End", 9),
                        ("j", 9), ("Home", 1)):  # fmt: skip
        page.keyboard.press(key)
        assert count.inner_text() == f"step {wanted} of 9", key
    page.get_by_label("Next step (j)").click()
    assert "products" in page.locator("#cards > section:not([hidden]) .formula").inner_text()
    page.get_by_role("link", name="weights").click()
    assert count.inner_text() == "step 7 of 9"
    page.go_back()
    opened.until("document.getElementById('count').textContent", "step 2 of 9")
    page.reload()
    assert count.inner_text() == "step 2 of 9"


def lit(opened, tone):
    return opened.page.locator(f"#cards > section:not([hidden]) td.{tone}").evaluate_all(
        "all => all.map((td) => `${td.closest('figure').querySelector('b').textContent} ${td.parentElement.rowIndex}`)"
    )


@pytest.mark.parametrize("how", ["hover", "focus"])
def test_a_score_lights_up_its_query_its_key_and_its_terms(how, show):
    opened = show(small(), "#step=products")
    score = cell(opened, "products", 2, 1)
    score.hover() if how == "hover" else score.focus()
    assert lit(opened, "lit") == ["products 3"]
    assert lit(opened, "tone-1") == ["query 3"] * 4
    assert lit(opened, "tone-2") == ["key 2"] * 4
    q, k = draw(3, 4)[2], draw(4, 4, seed=1)[1]
    written = opened.page.locator("#written").inner_text()
    terms = [f"({x:.4f})" if x < 0 else f"{x:.4f}" for pair in zip(q, k, strict=True) for x in pair]
    assert written.startswith(
        "products[2, 1] = " + " + ".join(f"{a}·{b}" for a, b in zip(terms[::2], terms[1::2], strict=True))
    )
    assert "query 2 → key 1" in written
    if how == "hover":
        opened.page.locator("h1").hover()
        assert opened.page.locator("#written").inner_text().startswith("products[0, 0]")


def test_an_output_lights_up_its_weights_and_the_values(show):
    opened = show(small(), "#step=output")
    cell(opened, "output", 1, 1).hover()
    assert lit(opened, "tone-1") == ["weights 2"] * 4
    assert lit(opened, "tone-2") == [f"value {n}" for n in range(1, 5)]


def test_another_head_is_chosen_where_heads_stand_side_by_side(show):
    torch.manual_seed(0)
    module, x = ch.nn.MultiHeadAttention(8, 2), draw(1, 3, 8)
    explanation = ch.explain(module, x, x, x)
    opened = show(explanation, "#step=joined")
    for head, column in ((1, 4), (0, 0)):
        opened.page.locator("#heads label").nth(head).click()
        value = number(float(explanation["joined"][0, 0, column]))
        assert opened.page.locator("#written").inner_text().startswith(f"joined[0, {column}] = {value}")
        assert lit(opened, "tone-1") == ["output 1"] and lit(opened, "lit") == ["joined 1"]
    cell(opened, "joined", 2, 5).click()
    opened.page.locator("#heads label").nth(1).click()
    assert opened.page.locator("#written").inner_text().startswith("joined[2, 4]")


def test_a_number_keeps_its_colour_when_others_are_edited(show):
    opened = show(small(), "#step=scores")
    colour = "(td) => getComputedStyle(td).backgroundColor"
    before = cell(opened, "scores", 1, 2).evaluate(colour), cell(opened, "scores", 0, 2).evaluate(colour)
    edit(opened, "query", 0, 0, "500")
    opened.page.evaluate("location.hash = '#step=scores'")
    opened.until("document.documentElement.dataset.shown", "scores")
    assert cell(opened, "scores", 1, 2).evaluate(colour) == before[0]
    assert cell(opened, "scores", 0, 2).evaluate(colour) != before[1]


def test_among_all_steps_a_weight_lights_up_its_query_and_key(show):
    opened = show(small(), "#step=weights")
    opened.page.get_by_role("button", name="all steps").click()
    card = opened.page.locator("section.chosen")
    card.locator("figure:not(.operand) tbody tr").nth(2).locator("td").nth(3).hover()
    assert lit(opened, "same") == ["query 3"] * 4 + ["key 4"] * 4 + ["value 4"] * 2
    assert opened.page.locator("section.card:visible").count() == 9


def test_a_click_fixes_a_number_and_its_address_brings_it_back(show):
    opened = show(small(), "#step=products")
    cell(opened, "products", 1, 3).click()
    opened.page.locator("h1").hover()
    assert opened.page.locator("#written").inner_text().startswith("products[1, 3]")
    opened.page.keyboard.press("j")
    assert opened.page.locator("#written").inner_text().startswith("scores[1, 3]")
    opened.page.reload()
    assert opened.page.locator("#written").inner_text().startswith("scores[1, 3]")


@pytest.mark.parametrize("hash", ["#step=nothing", "#step=products&at=Lq.99_Lk.99_B.7", "#%%%", "#at=__proto__.3&of=x"])
def test_an_address_that_names_nothing_does_no_harm(hash, show):
    opened = show(small(), hash)
    assert opened.page.locator("section.card:visible").count() == 1
    assert opened.page.locator("#written").inner_text()


def test_a_matrix_by_the_keyboard_alone(show):
    opened = show(small(), "#step=query")
    page = opened.page
    cell(opened, "query", 0, 0).focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowUp", "ArrowUp"):
        page.keyboard.press(key)
    assert page.locator("#written").inner_text().startswith("query[0, 2]")
    page.keyboard.press("Enter")
    page.keyboard.type("4.5")
    page.keyboard.press("Enter")
    assert numbers(opened, "query")[0, 0, 0, 2] == 4.5
    page.keyboard.press("ArrowDown")
    page.keyboard.type("-2")
    page.keyboard.press("Escape")
    assert numbers(opened, "query")[0, 0, 1, 2] == draw(3, 4)[1, 2]
    page.keyboard.press("j")
    assert "products" in page.evaluate("document.activeElement.closest('figure').innerText")


def test_every_control_is_reached_by_tab(show):
    opened = show(heads(), "#step=weights")
    reached = []
    for _ in range(45):
        opened.page.keyboard.press("Tab")
        reached.append(
            opened.page.evaluate(
                "document.activeElement.id || document.activeElement.name || document.activeElement.tagName"
            )
        )
    wanted = {"view", "theme", "previous", "next", "H", "scale-range", "temperature-range", "A", "TD"}
    assert wanted <= set(reached)
    assert (
        opened.page.evaluate("document.querySelectorAll('#cards section:not([hidden]) td[tabindex=\"0\"]').length") == 3
    )


@pytest.mark.parametrize("typed", ["", "abc", "1e400", "1e39", "inf", "NaN", "0x", "--3"])
def test_what_is_no_number_is_refused(typed, show):
    opened = show(small(), "#step=query")
    cell(opened, "query", 1, 1).click()
    opened.page.keyboard.press("Backspace")
    opened.page.keyboard.type(typed)
    opened.page.keyboard.press("Enter")
    assert opened.page.locator("td input[aria-invalid]").count() == 1
    assert "is no number" in opened.page.locator("#said").inner_text()
    opened.page.keyboard.press("Escape")
    same(opened, small(), 0)


# ---- How it looks


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["heads", "additive"])
def test_every_text_is_read_in_both_themes(name, theme, show):
    opened = show(EXAMPLES[name](), "#step=scores", color_scheme=theme)
    opened.page.get_by_role("button", name="all steps").click()
    assert opened.page.evaluate("document.documentElement.dataset.theme") == theme
    ratios = opened.page.locator(TEXTS).evaluate_all(LUMINANCE)
    assert len(ratios) > 300
    assert [row for row in ratios if row[0] < 4.5] == []
    before = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    opened.page.locator("#theme").click()
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert [row for row in opened.page.locator(TEXTS).evaluate_all(LUMINANCE) if row[0] < 4.5] == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_narrow_screen_scrolls_tables_and_not_the_page(name, show):
    opened = show(EXAMPLES[name](), viewport={"width": 390, "height": 800})
    fits(opened, 390)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_file_is_small(name):
    assert len(EXAMPLES[name]().html().encode()) < 150_000


def test_paper_has_every_step_with_its_shading(show):
    opened = show(small(), color_scheme="dark")
    opened.page.emulate_media(media="print")
    opened.until("document.documentElement.dataset.view", "all")
    assert opened.page.locator("section.card:visible").count() == 9
    assert opened.page.evaluate("document.documentElement.dataset.theme") == "light"
    shaded = opened.page.locator("td.cell").first
    assert shaded.evaluate("one => getComputedStyle(one).printColorAdjust") == "exact"
    opened.page.emulate_media(media="screen")
    opened.until("document.documentElement.dataset.view", "one")
    assert opened.page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_hostile_words_are_text(show):
    words = [*HOSTILE, "a", "b"]
    explanation = ch.explain(draw(6, 4), draw(8, 4, seed=1), draw(8, 2, seed=2))
    shown = dataclasses.replace(explanation.shown, query_words=tuple(HOSTILE), key_words=tuple(words))
    explanation = dataclasses.replace(explanation, shown=shown, title=HOSTILE[1] + HOSTILE[2])
    opened = show(explanation, "#step=products", viewport={"width": 390, "height": 800})
    names = opened.page.locator("section.card:visible figure:not(.operand) tbody th").all_inner_texts()
    assert names[:3] == [f"{place} {word}" for place, word in enumerate(HOSTILE[:3])]
    assert names[3] == "3 \\u202eשלום\\x00\\x07"
    assert opened.page.locator("h1").inner_text() == HOSTILE[1] + HOSTILE[2]
    assert opened.page.evaluate("window.bad") is None
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert opened.page.locator("img").count() == 0


def test_without_a_script_the_notebook_shows_every_step_as_text():
    explanation = heads()
    shown = dataclasses.replace(explanation.shown, query_words=HOSTILE, key_words=HOSTILE)
    text = dataclasses.replace(explanation, shown=shown)._repr_html_()
    assert "<script" not in text and "<img" not in text and "\x00" not in text and "\u202e" not in text
    assert [step.name for step in explanation.steps if f"<b>{step.name}" not in text] == []
    assert text.count("<table>") == text.count("</table>") >= len(explanation.steps)
    text.encode()
