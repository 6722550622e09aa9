"""The title of an explanation and the digits of its numbers, in each form; the numbers themselves stay the same."""

from __future__ import annotations

import contextlib
import io
import math

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.base.symbolic.formulas import number, with_digits
from clearhead.explanation.examples import EXAMPLES, example

QUERY, KEY = [[0.3, 1.7]], [[1.25, -0.5], [0.125, 2.0], [1.0, 0.015625]]
VALUE = [[1.0], [2.0], [-4.0]]
HOSTILE = "The </title><script>alert(1)</script> *head* {digits}"


def explained(**options):
    return ch.explain(*(torch.tensor(rows) for rows in (QUERY, KEY, VALUE)), **options)


def by_hand():
    """The weights of the three keys, in plain Python."""
    scores = [sum(a * b for a, b in zip(QUERY[0], row, strict=True)) / math.sqrt(2) for row in KEY]
    total = sum(map(math.exp, scores))
    return [math.exp(score) / total for score in scores]


@pytest.mark.parametrize("title", ["The first head", HOSTILE])
def test_the_title_stands_in_every_form(title, show):
    found = explained(title=title)
    assert found.title == found.to_dict()["title"] == title
    assert str(found).splitlines()[0] == title
    assert found.script().splitlines()[0] == f"# {title}"
    assert found.markdown().splitlines()[0].replace("\\", "").replace("&lt;", "<").replace("&gt;", ">") == f"# {title}"
    assert ("<h3>The first head</h3>" in found._repr_html_()) == (title != HOSTILE)
    assert "<script>" not in found._repr_html_() and "alert(1)" not in explained()._repr_html_()
    assert repr(found.frame()).startswith(f"Frame(title={title!r}")
    page = show(found).page
    assert page.title() == page.locator("h1").inner_text() == title


def test_a_title_of_two_lines_is_no_code():
    script = explained(title="one\nraise SystemExit").script()
    assert script.splitlines()[0] == r"# one\nraise SystemExit"
    compile(script, "script", "exec")


def test_without_a_title_the_computation_is_named():
    assert explained().title == "Scaled dot-product attention, step by step"
    assert explained(title=None, digits=None).html() == explained().html() == explained(digits=4).html()


NUMBERS = [0.54, 0.2, 3.0, 12345.5, 0.0456, 0.00123456789, 0.0996, -math.inf]


@pytest.mark.parametrize(
    ("digits", "shown"),
    [
        (1, "0.5 0.2 3 1e+04 0.05 0.001 0.1 -∞"),
        (2, "0.54 0.20 3 1.2e+04 0.046 0.0012 0.10 -∞"),
        (3, "0.540 0.200 3 1.23e+04 0.0456 0.00123 0.0996 -∞"),
        (7, "0.5400000 0.2000000 3 1.234550e+04 0.04560000 0.001234568 0.09960000 -∞"),
    ],
)
def test_a_number_has_these_digits(digits, shown):
    found = ch.explain(torch.tensor([NUMBERS], dtype=torch.float64), digits=digits)
    with with_digits(digits):
        assert [number(x) for x in NUMBERS] == shown.split()
    assert all(f">{text}<" in found._repr_html_() for text in shown.split())


@pytest.mark.parametrize("digits", [2, 6])
def test_the_weights_are_written_with_these_digits_in_every_form(digits, show):
    found, usual = explained(digits=digits), explained()
    weights = by_hand()
    wanted = [f"{w:.{digits if w >= 0.1 else digits + 1}f}" for w in weights]
    assert min(weights) > 0.01 and max(weights) > 0.1
    for name in ("query", "products", "scores", "weights", "output"):
        assert torch.equal(found[name], usual[name]), name
    np.testing.assert_allclose(found["weights"][0], weights, rtol=1e-6)
    text, markdown = str(found), found.markdown()
    assert any(line.split()[-3:] == wanted for line in text.splitlines())
    assert any([cell.strip() for cell in line.split("|")][-4:-1] == wanted for line in markdown.splitlines())
    assert all(f">{w}<" in found._repr_html_() for w in wanted)
    said = next(line for line in text.splitlines() if line.strip().startswith("weights[0, 0] ="))
    assert said.endswith(f" = {wanted[0]}") and "1/√2" in text and f"{math.sqrt(0.5):.{digits}f} is" in text
    entry = {step["name"]: step for part in found.to_dict()["parts"] for step in part["steps"]}["weights"]
    assert entry["tables"][0]["cells"] == [usual["weights"][0].double().tolist()]  # plain numbers have all digits
    assert entry["written_out"].endswith(f"= {wanted[0]}")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(found.script(), "script", "exec"), {})
    torch.set_printoptions(profile="default")
    assert f"{weights[0]:.{digits}f}" in printed.getvalue()
    opened = show(found, "#step=weights")
    table = opened.page.locator("#cards > section:not([hidden]) figure:not(.operand) td")
    assert table.all_inner_texts()[1:] == wanted  # behind the name of the row
    assert opened.page.locator("#written").inner_text().splitlines()[0] == said.strip()
    opened.page.evaluate("location.hash = '#step=scores'")
    opened.until("document.documentElement.dataset.shown", "scores")
    formula = opened.page.locator("#cards > section:not([hidden]) .formula")
    assert f"products[i, j] · {math.sqrt(0.5):.{digits}f}" in formula.inner_text()
    opened.page.locator("#scale input[type=range]").fill("-1")  # half of it
    assert f"products[i, j] · {math.sqrt(0.125):.{digits}f}" in formula.inner_text()


def test_no_digits_are_left_over():
    with pytest.raises(ch.ClearheadError):
        explained(digits=3, at=(0, 0, 0, 0, 0))
    explained(digits=3)
    assert number(0.5) == "0.5000" and number(0.01) == "0.01000"


@pytest.mark.parametrize("gradients", [False, True])
def test_gradients_too(gradients):
    found = explained(digits=2, gradients=gradients, title="Both ways")
    assert ("d_query" in str(found)) == gradients and found.digits == 2
    assert "0.71" in str(found) and "0.7071" not in str(found)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_have_the_same_numbers(name):
    found, usual = example(name, "A name", 2), example(name)
    assert [step.name for step in found.steps] == [step.name for step in usual.steps]
    assert all(torch.equal(a.value, b.value) for a, b in zip(found.steps, usual.steps, strict=True))
    assert found.title == "A name" and usual.digits == 4


def test_a_recorded_call():
    block, x = ch.nn.DotProductAttention(), torch.eye(4).expand(1, 2, 4, 4)
    with ch.watch(block) as seen:
        block(x, x, x, mask=ch.Causal())
    share = math.exp(0.5) / (math.exp(0.5) + 3)  # of its own key, whose score is 1/√4, beside three scores of 0
    for found in (
        seen.explain(0, 1, 3, title="Head 1", digits=3),
        seen[0].explain((0, 1, 3), title="Head 1", digits=3),
    ):
        assert str(found).splitlines()[0] == "Head 1"
        assert f" {share:.3f}" in str(found) and f"{share:.4f}" not in str(found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"digits": 0}, "digits is 0; expected a whole number, 1 or more"),
        ({"digits": 16}, "digits is 16; expected 15 at most"),
        ({"digits": True}, "digits is True; expected a whole number"),
        ({"digits": 2.5}, "digits is 2.5; expected a whole number"),
    ],
)
def test_bad_input_is_one_clear_error(options, words):
    with pytest.raises(ch.ClearheadError, match=words):
        explained(**options)


@pytest.mark.parametrize(("digits", "below"), [(1, 2), (3, 4), (None, 5)])
def test_a_picture_has_the_digits_of_its_tables(digits, below):
    """After the point, and in all below 0.1, where two of the three weights are."""
    pytest.importorskip("matplotlib").use("Agg")
    axis, weights = explained(digits=digits).plot(), by_hand()
    wanted = [f"{w:.{below if w < 0.1 else digits or 4}f}" for w in weights]
    assert [w < 0.1 for w in weights] == [True, False, True]
    assert [text.get_text() for text in axis.texts] == wanted


def test_a_picture_has_fewer_digits_where_they_do_not_fit():
    pytest.importorskip("matplotlib").use("Agg")
    words = [text.get_text() for text in ch.explain(*[torch.eye(8)] * 3, digits=15).plot().texts]
    assert len(words) == 64 and set(map(len, words)) == {4}  # two after the point
