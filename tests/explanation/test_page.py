"""The page of an explanation in a browser: its numbers against Python's, and all that a reader does on it."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import Opened, open_file
from playwright.sync_api import Browser

import clearhead as ch
from clearhead.base.shapes import Sizes
from clearhead.base.steps import number
from clearhead.testing import masks, scores

NAMED = {score.__name__: score for score in scores()}
COMPUTED = [name for name in NAMED if name != "ScoreFunction"]  # whose steps are known


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """`show(explanation, hash="", init=None, **context)` opens its page from disk."""
    everything: list[Opened] = []

    def show_one(explanation: Any, hash: str = "", init: str | None = None, **context: Any) -> Opened:
        path = explanation.html(tmp_path / f"page{len(everything)}.html")
        opened = open_file(browser, path, Opened, hash, init, **context)
        everything.append(opened)
        return opened

    yield show_one
    for opened in everything:
        opened.close()


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def small(**given):
    return ch.explain(draw(3, 4), draw(4, 4, seed=1), draw(4, 2, seed=2), **given)


def heads(**given):
    return ch.explain(*(draw(1, 4, 6, 8, seed=n) for n in range(3)), mask=ch.Causal(), **given)


EXAMPLES = {
    "dot": small,
    "heads": heads,
    "additive": lambda: ch.explain(
        draw(2, 3, 4), draw(2, 5, 6, seed=1), draw(2, 5, 3, seed=2), score=ch.Additive(4, 6, 5), mask=ch.Lengths([3, 5])
    ),
    "regression": lambda: ch.explain(draw(5, 1), draw(9, 1, seed=1), draw(9, 1, seed=2), score=ch.Gaussian(0.7)),
    "sinks": lambda: ch.explain(
        draw(2, 2, 3, 4), draw(2, 2, 5, 4, seed=1), draw(2, 2, 5, 2, seed=2), score=ch.Dot(softcap=2.0), sinks=draw(2)
    ),
    "wide": lambda: ch.explain(draw(8, 32), draw(40, 32, seed=1), draw(40, 16, seed=2)),
}


def numbers(opened, name, hook="numbers"):
    """A step's numbers as the page has them now, in its own shape."""
    flat, sizes = opened.page.evaluate(f"[clearhead.{hook}({name!r}), clearhead.sizes({name!r})]")
    return torch.tensor([float(str(x).replace("Infinity", "inf")) for x in flat], dtype=torch.float64).reshape(sizes)


def same(opened, explanation, tolerance=1e-6, hook="numbers"):
    """Every step of the page is that of this explanation, to `tolerance`, relative for numbers above 1."""
    assert opened.page.evaluate("clearhead.names()") == [step.name for step in explanation.steps]
    for step in explanation.steps:
        mine, theirs = numbers(opened, step.name, hook), step.value.detach().double()
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, equal_nan=True, msg=step.name)


def cell(opened, step, row, column, result=True):
    """A number of the chosen card, by its table's name and its place."""
    table = f"#cards > section:not([hidden]) figure{':not(.operand)' if result else '.operand'}"
    named = opened.page.locator(table).filter(has=opened.page.locator(f"figcaption b:text-is({json.dumps(step)})"))
    return named.locator("tbody tr").nth(row).locator("td").nth(column)


def edit(opened, step, row, column, value):
    """Type a number into an input's cell, on the card of that input."""
    opened.page.evaluate(f"location.hash = '#step={step}'")
    opened.until("document.documentElement.dataset.shown", step)
    cell(opened, step, row, column).click()
    opened.page.keyboard.type(value)
    opened.page.keyboard.press("Enter")


# ---- Its numbers


MORE = {
    "plain": {},
    "bias": {"bias": draw(1, 2, 4, 5, seed=3)},
    "sinks": {"sinks": draw(2, seed=4)},
    "both": {"bias": draw(1, 2, 4, 5, seed=3), "sinks": draw(2, seed=4)},
}


def example(name, mask=None, more="plain"):
    """An explanation of a score of its class's own example, with a mask's own, and what it was given."""
    score, query_dim, key_dim = NAMED[name].example()
    shapes = {"query": (4, query_dim), "key": (5, key_dim), "value": (5, 3)}
    inputs = {n: draw(2, 2, *shape, seed=s) for s, (n, shape) in enumerate(shapes.items())}
    mask = mask if mask is None or isinstance(mask, ch.Mask) else mask.example(Sizes(2, 2, 4, 5, align="lower_right"))
    given = {"score": score, "mask": mask, "align": "lower_right", **MORE[more]}
    return ch.explain(**inputs, **given), inputs, given


def test_the_page_knows_every_line_of_code(show):
    codes = {
        step.code for name in COMPUTED for mask in [None, *masks()] for more in MORE
        for step in example(name, mask, more)[0].steps if step.code
    }  # fmt: skip
    assert len(codes) > 40
    opened = show(small())
    assert [code for code in sorted(codes) if opened.page.evaluate("(code) => clearhead.unknown(code)", code)] == []
    assert opened.page.evaluate("clearhead.unknown('a = torch.fft(b)')") == ["fft"]


@pytest.mark.parametrize("mask", [None, *masks()], ids=lambda m: "no mask" if m is None else m.__name__)
def test_the_page_computes_every_step_of_every_score_and_mask(mask, show):
    for n, name in enumerate(COMPUTED):
        explanation = example(name, mask, list(MORE)[(n + masks().index(mask) if mask else n) % len(MORE)])[0]
        opened = show(explanation)
        assert opened.page.evaluate("clearhead.obstacle") == "", name
        same(opened, explanation, 0)  # nothing is changed: they are Python's own
        same(opened, explanation, hook="computed")  # the page's own, each from the steps before it


MASKS = {"none": None, "causal": ch.Causal(), "lengths": ch.Lengths([2, 5]), "both": ch.Causal() & ch.Lengths(4)}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", COMPUTED)
def test_edited_inputs_give_what_python_gives(name, mask, show):
    more = list(MORE)[(COMPUTED.index(name) + list(MASKS).index(mask)) % len(MORE)]
    explanation, inputs, given = example(name, MASKS[mask], more)
    score = given["score"]
    opened = show(explanation)
    first = {step.name: numbers(opened, step.name) for step in explanation.steps}
    for n, (tensor, value) in enumerate(zip(inputs.values(), ("0.7", "-1.25", "3"), strict=True)):
        tensor[0, 0, n, 1] = float(value)
        edit(opened, list(inputs)[n], n, 1, value)
    same(opened, ch.explain(**inputs, **given))
    parameters = dict(score.named_parameters())
    for step in [*parameters, *(["h"] if name == "Gaussian" else [])]:
        edit(opened, step, 0, 0, "0.25")
        with torch.no_grad():
            if step in parameters:
                parameters[step].view(-1)[0] = 0.25
            else:
                given["score"] = ch.Gaussian(0.25)
    # Scores are large now, and exp of them in float32 is off by more: the page computes in float64, as Python can
    wide = {n: x.double() if isinstance(x, torch.Tensor | ch.Score) else x for n, x in (inputs | given).items()}
    same(opened, ch.explain(**wide), 1e-9)
    opened.page.get_by_role("button", name="reset").click()
    assert all(torch.equal(numbers(opened, n), first[n]) for n in first)


@pytest.mark.parametrize("cap", [None, 1.5])
def test_the_sliders_give_what_python_gives(cap, show):
    query, key, value = draw(3, 4), draw(4, 4, seed=1), draw(4, 2, seed=2)
    opened = show(ch.explain(query, key, value, score=ch.Dot(softcap=cap), mask=ch.Lengths(3)))
    opened.page.locator("#scale input[type=range]").fill("1.5")
    scale = opened.page.evaluate("clearhead.change().scale")
    assert scale == pytest.approx(0.5 * 2**1.5)
    same(opened, ch.explain(query, key, value, score=ch.Dot(softcap=cap), mask=ch.Lengths(3), scale=scale))
    opened.page.get_by_label("The scale as a number").fill("0.3")
    opened.page.get_by_label("The scale as a number").press("Enter")
    same(opened, ch.explain(query, key, value, score=ch.Dot(softcap=cap), mask=ch.Lengths(3), scale=0.3))


@pytest.mark.parametrize("more", MORE)
def test_the_temperature_divides_all_that_the_softmax_is_taken_of(more, show):
    query, key, value = draw(2, 2, 4, 4), draw(2, 2, 5, 4, seed=1), draw(2, 2, 5, 3, seed=2)
    explanation = ch.explain(query, key, value, **MORE[more])
    opened = show(explanation)
    opened.page.get_by_label("The temperature as a number").fill("0.4")
    opened.page.get_by_label("The temperature as a number").press("Enter")
    logits = explanation["scores"].double() / 0.4
    if "sinks" in MORE[more]:
        sinks = (MORE[more]["sinks"].double() / 0.4).view(1, 2, 1, 1).expand(2, 2, 4, 1)
        logits = torch.cat([logits, sinks], -1)
    weights = logits.softmax(-1)[..., :5]
    torch.testing.assert_close(numbers(opened, "weights"), weights, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(numbers(opened, "output"), weights @ value.double(), rtol=1e-6, atol=1e-6)


def test_a_step_with_many_vectors_is_computed_in_the_page(show):
    query, key, value = draw(8, 6), draw(40, 6, seed=1), draw(40, 3, seed=2)
    explanation = ch.explain(query, key, value, score=ch.Additive(6, 6, 32))
    opened = show(explanation, "#step=hidden&at=Lq.5")
    assert explanation["hidden"].numel() > 10_000
    same(opened, explanation)
    caption = opened.page.locator("#cards > section:not([hidden]) figure:not(.operand) figcaption")
    assert "query 5" in caption.inner_text()
    key[3, 2] = 2.5
    edit(opened, "key", 3, 2, "2.5")
    same(opened, ch.explain(query, key, value, score=explanation_score(explanation)))


def explanation_score(explanation):
    """An Additive of an explanation's own parameters."""
    return ch.Additive.from_weights(explanation["W_q"], explanation["W_k"], explanation["w_v"])


def test_of_a_long_call_the_page_shows_a_part_with_places_of_the_whole(show):
    query, key, value = draw(40, 80), draw(300, 80, seed=1), draw(300, 3, seed=2)
    explanation = ch.explain(query, key, value, score=ch.Additive(80, 80, 70), at=(slice(20, 24),))
    opened = show(explanation, "#step=weights")
    shown = explanation.shown
    table = opened.page.locator("#cards > section:not([hidden]) figure:not(.operand)")
    assert table.locator("thead th").all_text_contents()[-64:] == [f"key {place}" for place in shown.keys]
    assert table.locator("tbody th").all_text_contents() == [f"query {place}" for place in range(20, 24)]
    weights = explanation["weights"][:, list(shown.keys)].double()
    torch.testing.assert_close(numbers(opened, "weights")[0, 0], weights, rtol=0, atol=0)
    sentence = opened.page.evaluate("clearhead.sentence('total', [0, 0, 1, 0])")
    assert "… (292 more)" in sentence and f"= {number(explanation['total'][1, 0])}" in sentence
    for step in ("pairs", "hidden", "scores"):
        opened.page.evaluate(f"location.hash = '#step={step}'")
        opened.until("document.documentElement.dataset.shown", step)
        assert opened.page.locator("#written").inner_text().startswith(step)


def test_numbers_are_printed_as_python_prints_them(show):
    found = [k / 32 for k in range(-9, 9)] + [12345.0, 12355.0, -1e4, 9999.99995, 0.001, 9.9995e-4, 2e-7, 1e30, -0.0]
    query = torch.tensor([found], dtype=torch.float64)
    opened = show(ch.explain(query, query[[0, 0]] * 0, query[[0, 0]] * 0))
    sentences = [opened.page.evaluate(f"clearhead.sentence('query', [0, 0, 0, {n}])") for n in range(len(found))]
    assert [sentence.split(" = ")[1] for sentence in sentences] == [number(x) for x in found]


def test_heads_that_share_a_key_head_are_edited_together(show):
    query, key, value = draw(2, 2, 3, 4), draw(2, 1, 5, 4, seed=1), draw(1, 1, 5, 2, seed=2)
    opened = show(ch.explain(query, key, value.expand(2, 1, 5, 2)))
    key[1, 0, 2, 0], value[0, 0, 0, 1] = 9.0, -7.0
    edit_at = "#step={}&at=B.1_H.1"
    for step, row, column, typed in (("key", 2, 0, "9"), ("value", 0, 1, "-7")):
        opened.page.evaluate(f"location.hash = {edit_at.format(step)!r}")
        opened.until("document.documentElement.dataset.shown", step)
        cell(opened, step, row, column).click()
        opened.page.keyboard.type(typed)
        opened.page.keyboard.press("Enter")
    same(opened, ch.explain(query, key, value.expand(2, 1, 5, 2)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_edited_as_they_are_computed(dtype, show):
    query = draw(3, 4).to(dtype)
    opened = show(ch.explain(query, query, query))
    edit(opened, "query", 0, 0, "0.1")
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    assert numbers(opened, "query")[0, 0, 0, 0] == torch.tensor(0.1, dtype=kept).double()


class Own(ch.Score):
    def tile(self, query, key):
        return query @ key.mT


@pytest.mark.parametrize(
    ("explanation", "words"),
    [
        (lambda: small(score=Own()), "shows no steps of its own"),
        (lambda: ch.explain(draw(3, 4), draw(80, 4), draw(80, 2)), "64 of 80 keys"),
        (lambda: ch.explain(draw(3, 4), draw(60, 256), draw(60, 2), score=ch.Bilinear(4, 256)), "inputs are too many"),
        (lambda: ch.explain(draw(3, 4) / 0, draw(4, 4), draw(4, 2)), "hold NaN"),
        (lambda: altered(small(), code="products = query.mystery(key)"), "no operation mystery"),
        (lambda: altered(small(), code="products = query @ key.transpose(-1, -2) + 1"), "not give Python's numbers"),
    ],
)
def test_where_it_cannot_compute_it_says_why_and_offers_no_change(explanation, words, show):
    opened = show(explanation(), "#step=query")
    assert words in opened.page.locator("#left-out").inner_text()
    assert opened.page.locator("#scale, #temperature, #reset").evaluate_all("all => all.every((one) => one.hidden)")
    first = opened.page.locator("td.cell").first
    first.click()
    opened.page.keyboard.type("5")
    assert opened.page.locator("td input").count() == 0
    assert "query[" in opened.page.locator("#written").inner_text()


def altered(explanation, **change):
    """The explanation with another step "products"."""
    parts = [
        dataclasses.replace(
            part, steps=tuple(dataclasses.replace(s, **change) if s.name == "products" else s for s in part.steps)
        )
        for part in explanation.parts
    ]
    return dataclasses.replace(explanation, parts=tuple(parts))


def value_of(sentence):
    """What the right side of a sentence comes to, by Python's own arithmetic; and what it says that it is."""
    _, made, result = sentence.replace("∞", "inf").split(" = ")
    made = re.sub(r"²", "**2", made.replace("·", "*").replace("√", "sqrt"))
    space = {"exp": torch.exp, "tanh": torch.tanh, "sqrt": torch.sqrt, "inf": torch.inf}
    space["max"] = lambda *all: max(all)
    made = re.sub(r"(exp|tanh|sqrt)\(", r"\1(0*one + ", made)
    return float(eval(made, {**space, "one": torch.tensor(1.0).double()})), float(result)


@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_written_out_comes_to_the_number(name, show):
    score, query_dim, key_dim = NAMED[name].example()
    query, key, value = draw(2, 2, 4, query_dim), draw(2, 2, 5, key_dim, seed=1), draw(2, 2, 5, 3, seed=2)
    explanation = ch.explain(query, key, value, score=score, sinks=draw(2), bias=draw(1, 1, 4, 5, seed=7))
    opened = show(explanation)
    for step in explanation.steps:
        if step.given:
            continue
        for at in (0, -1):
            index = [0 if at == 0 else n - 1 for n in step.value.shape]
            made, said = value_of(opened.page.evaluate(f"clearhead.sentence({step.name!r}, {index})"))
            assert said == pytest.approx(float(step.value[tuple(index)]), abs=5.1e-5, rel=1e-3)
            assert made == pytest.approx(said, abs=2e-3, rel=2e-3), step.name  # its numbers have four digits


# ---- What a reader does


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


def test_a_sentence_with_figures_is_marked_after_an_edit(show):
    opened = show(small(), "#step=output")
    assert "With the numbers first given" not in opened.page.locator("#cards").inner_text()
    opened.page.get_by_label("The temperature as a number").fill("9")
    opened.page.get_by_label("The temperature as a number").press("Enter")
    assert "With the numbers first given: Each output" in opened.page.locator("#cards").inner_text()
    opened.page.get_by_role("button", name="reset").click()
    assert "With the numbers first given" not in opened.page.locator("#cards").inner_text()


# ---- How it looks


LUMINANCE = """
(all) => all.map((one) => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (colour) => colour.slice(0, 3).map((x) => x / 255)
    .map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, n) => sum + x * [0.2126, 0.7152, 0.0722][n], 0);
  let behind = one;
  while (behind && (rgb(getComputedStyle(behind).backgroundColor)[3] ?? 1) === 0) behind = behind.parentElement;
  const [a, b] = [light(rgb(getComputedStyle(one).color)), light(rgb(getComputedStyle(behind).backgroundColor))];
  return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), one.outerHTML.slice(0, 80)];
})
"""
TEXTS = "h1, h2, button:not(:disabled), a, .formula, .shape, .why, figcaption *, th, td.cell:not(.allowed), pre, .quiet"
TEXTS += ", #written *"


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
    for _ in range(30):
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
        opened.page.keyboard.press("j")
    opened.page.get_by_role("button", name="all steps").click()
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390


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


HOSTILE = (
    "<script>window.bad = 1</script>",
    "</script><img src=x onerror='window.bad=1'>",
    "\"'`&lt;{{data}}",
    "\u202eשלום\u0000\u0007",
    "w" * 3000,
    "\ud800",
)


def test_hostile_words_are_text(show):
    words = [*HOSTILE, "a", "b"]
    explanation = ch.explain(draw(6, 4), draw(8, 4, seed=1), draw(8, 2, seed=2))
    shown = dataclasses.replace(explanation.shown, query_words=tuple(HOSTILE), key_words=tuple(words))
    explanation = dataclasses.replace(explanation, shown=shown, title=HOSTILE[1] + HOSTILE[2])
    opened = show(explanation, "#step=products", viewport={"width": 390, "height": 800})
    names = opened.page.locator("section.card:visible figure:not(.operand) tbody th").all_inner_texts()
    assert names[:3] == list(HOSTILE[:3])
    assert names[3] == "\\u202eשלום\\x00\\x07"
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


def test_a_page_that_cannot_be_written_is_an_error_that_says_so(tmp_path):
    with pytest.raises(ch.ClearheadError, match="cannot write the page"):
        small().html(tmp_path / "no such folder" / "page.html")
    path = small().html(tmp_path / "page.html")
    assert path.read_text(encoding="utf-8") == small().html()
