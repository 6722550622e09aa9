"""The numbers of an explanation's page in a browser, against Python's."""

import dataclasses
import re

import pytest
import torch
from drawn import draw
from opened_page import all_numbers, cell, edit, numbers, same, small

import clearhead as ch
from clearhead.base.shapes import Sizes
from clearhead.base.symbolic.formulas import number, with_digits
from clearhead.testing import masks, scores

NAMED = {score.__name__: score for score in scores()}
COMPUTED = [name for name in NAMED if name != "ScoreFunction"]  # whose steps are known

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
    mask = (
        mask
        if mask is None or isinstance(mask, ch.extend.Mask)
        else mask.example(Sizes(2, 2, 4, 5, align="lower_right"))
    )
    given = {"score": score, "mask": mask, "align": "lower_right", **MORE[more]}
    if mask is not None and mask._document_edges is not None and "bias" in given:  # that of the longest document
        given["bias"] = given["bias"][..., : mask._document_edges.queries.longest, : mask._document_edges.keys.longest]
    return ch.explain(**inputs, **given), inputs, given


def called(name, *inputs):
    """The tree of an operation, as a page is given it."""
    return {"kind": "call", "name": name, "inputs": list(inputs), "options": {}}


def test_the_page_knows_every_operation(show):
    trees = {
        step.code: step.tree for name in COMPUTED for mask in [None, *masks()] for more in MORE
        for step in example(name, mask, more)[0].steps if step.code
    }  # fmt: skip
    assert len(trees) > 40
    opened = show(small())
    some = "(trees) => trees.flatMap((tree) => clearhead.unknown(tree))"
    assert opened.page.evaluate(some, [*trees.values()]) == []
    assert opened.page.evaluate(some, [called("fft", {"kind": "name", "name": "b"})]) == ["fft"]


@pytest.mark.parametrize("mask", [None, *masks()], ids=lambda m: "no mask" if m is None else m.__name__)
def test_the_page_computes_every_step(mask, show):
    at = 1 + masks().index(mask) if mask else 0
    for n in (at % len(COMPUTED), (at + 2) % len(COMPUTED)):  # each score with some of the masks
        name = COMPUTED[n]
        explanation = example(name, mask, list(MORE)[(n + at) % len(MORE)])[0]
        opened = show(explanation)
        assert opened.page.evaluate("clearhead.obstacle") == "", name
        same(opened, explanation, 0)  # nothing is changed: they are Python's own
        same(opened, explanation, hook="computed")  # the page's own, each from the steps before it


MASKS = {"lengths": ch.Lengths([2, 5]), "both": ch.Causal() & ch.Lengths(4)}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", COMPUTED)
def test_edited_inputs_give_what_python_gives(name, mask, show):
    more = list(MORE)[(COMPUTED.index(name) + list(MASKS).index(mask)) % len(MORE)]
    explanation, inputs, given = example(name, MASKS[mask], more)
    score = given["score"]
    opened = show(explanation)
    first = all_numbers(opened, [step.name for step in explanation.steps])
    for n, (tensor, value) in enumerate(zip(inputs.values(), ("0.7", "-1.25", "3"), strict=True)):
        tensor[0, 0, n, 1] = float(value)
        edit(opened, list(inputs)[n], n, 1, value)
    same(opened, ch.explain(**inputs, **given))
    parameters = dict(score.named_parameters())
    for step in [*parameters, *(["bandwidth"] if name == "Gaussian" else [])]:
        edit(opened, step, 0, 0, "0.25")
        with torch.no_grad():
            if step in parameters:
                parameters[step].view(-1)[0] = 0.25
            else:
                given["score"] = ch.Gaussian(0.25)
    # Scores are large now, and exp of them in float32 is off by more: the page computes in float64, as Python can
    wide = {n: x.double() if isinstance(x, torch.Tensor | ch.extend.Score) else x for n, x in (inputs | given).items()}
    same(opened, ch.explain(**wide), 1e-9)
    opened.page.get_by_role("button", name="reset").click()
    again = all_numbers(opened, list(first))
    assert all(torch.equal(again[n], first[n]) for n in first)


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


@pytest.mark.parametrize("digits", [1, 4, 9, 15])
def test_numbers_are_printed_as_python_prints_them(show, digits):
    found = [k / 32 for k in range(-9, 9)] + [12345.0, 12355.0, -1e4, 9999.99995, 0.001, 9.9995e-4, 2e-7, 1e30, -0.0]
    query = torch.tensor([found], dtype=torch.float64)
    opened = show(ch.explain(query, query[[0, 0]] * 0, query[[0, 0]] * 0, digits=digits))
    written = sentences(opened, [("query", [0, 0, 0, n]) for n in range(len(found))])
    with with_digits(digits):
        assert [sentence.split(" = ")[1] for sentence in written] == [number(x) for x in found]


def sentences(opened, asked):
    """Numbers written out by the page, each asked by its step's name and its index."""
    return opened.page.evaluate("(asked) => asked.map(([name, index]) => clearhead.sentence(name, index))", asked)


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


class Own(ch.extend.Score):
    def tile(self, query, key):
        return query @ key.mT


@pytest.mark.parametrize(
    ("explanation", "words"),
    [
        (lambda: small(score=Own()), "shows no steps of its own"),
        (lambda: ch.explain(draw(3, 4), draw(80, 4), draw(80, 2)), "64 of 80 keys"),
        (lambda: ch.explain(draw(3, 4), draw(60, 256), draw(60, 2), score=ch.Bilinear(4, 256)), "inputs are too many"),
        (lambda: ch.explain(draw(3, 4) / 0, draw(4, 4), draw(4, 2)), "hold NaN"),
        (lambda: altered(small(), tree=called("mystery", {"kind": "name", "name": "query"})), "no operation mystery"),
        (lambda: altered(small(), tree=called("neg", small().steps[3].tree)), "not give Python's numbers"),
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
    asked = [
        (step, [0 if at == 0 else n - 1 for n in step.value.shape])
        for step in explanation.steps if not step.given for at in (0, -1)
    ]  # fmt: skip
    written = sentences(opened, [(step.name, index) for step, index in asked])
    for (step, index), sentence in zip(asked, written, strict=True):
        made, said = value_of(sentence)
        assert said == pytest.approx(float(step.value[tuple(index)]), abs=5.1e-5, rel=1e-3)
        assert made == pytest.approx(said, abs=2e-3, rel=2e-3), step.name  # its numbers have four digits


@pytest.mark.parametrize("mask", [None, ch.SlidingWindow(before=1)], ids=str)
def test_scores_whose_powers_overflow(mask, show):
    explanation = ch.explain(draw(4, 4) * 300, draw(4, 4, seed=1) * 300, draw(4, 2, seed=2), mask=mask)
    opened = show(explanation)
    assert opened.page.evaluate("clearhead.obstacle") == ""
    same(opened, explanation, hook="computed")


def test_a_number_that_is_set_back_is_no_change(show):
    opened = show(small())
    reset = opened.page.get_by_role("button", name="reset")
    edit(opened, "query", 1, 2, "2.5")
    assert reset.is_enabled()
    edit(opened, "query", 1, 2, repr(float(draw(3, 4)[1, 2])))
    assert reset.is_disabled()
    same(opened, small(), 0)
