"""Whole numbers and masks that are changed on an explanation's page, against Python with the same ones."""

import pytest
import torch
from drawn import draw
from opened_page import EXAMPLES, cell, edit, numbers, open_step, same, small

import clearhead as ch
from clearhead import nn
from clearhead.explanation.examples import example
from clearhead.models import bundled, load

QUERY, KEY, VALUE = draw(2, 2, 3, 4), draw(2, 2, 5, 4, seed=1), draw(2, 2, 5, 2, seed=2)


def explained(mask, **given):
    return ch.explain(QUERY, KEY, VALUE, mask=mask, **given)


def type_into(opened, step, row, column, value, sequence=0):
    """Type a whole number into an input of one of the sequences."""
    open_step(opened, step, sequence=sequence)
    cell(opened, step, row, column).click()
    opened.page.keyboard.type(value)
    opened.page.keyboard.press("Enter")


def turn_over(opened, step, row, column, sequence=0):
    open_step(opened, step, sequence=sequence)
    cell(opened, step, row, column).click()


def check(opened, explanation, **changed):
    """Every step of the page is what its line of PyTorch computes, where some inputs are others."""
    space = {"torch": torch, "inf": torch.inf} | {step.name: step.value for step in explanation.steps if step.given}
    space |= changed
    for step in explanation.steps:
        if step.code:
            exec(step.code, space)
        if step is explanation.steps[-1] and step.name not in space:  # a last layer of too many weights to be listed
            continue
        mine, theirs = numbers(opened, step.name), space[step.name].double()
        torch.testing.assert_close(mine, theirs.expand_as(mine), rtol=1e-6, atol=1e-6, equal_nan=True, msg=step.name)


def with_entry(tensor, at, value):
    tensor = tensor.clone()
    tensor[at] = value
    return tensor


def value_of(explanation, name):
    return next(step.value for step in explanation.steps if step.name == name)


# ---- Whole numbers


@pytest.mark.parametrize(
    "more", [{}, {"sinks": draw(2, seed=4)}, {"score": ch.Gaussian(0.8)}], ids=["", "sinks", "score"]
)
def test_lengths_of_sequences(more, show):
    opened = show(explained(ch.Lengths([2, 5]), **more))
    assert opened.page.evaluate("clearhead.obstacle") == ""
    type_into(opened, "mask_lengths", 0, 0, "4")
    same(opened, explained(ch.Lengths([4, 5]), **more))
    type_into(opened, "mask_lengths", 0, 0, "1", sequence=1)
    later = explained(ch.Lengths([4, 1]), **more)
    steps = opened.page.evaluate("clearhead.names()")
    for step in later.steps:  # both have padding now: the check on padding stands on both pages
        if step.name in steps:
            torch.testing.assert_close(numbers(opened, step.name), step.value.double(), rtol=1e-6, atol=1e-6)
    opened.page.get_by_role("button", name="reset").click()
    same(opened, explained(ch.Lengths([2, 5]), **more), 0)


@pytest.mark.parametrize("sinks", [None, draw(2, seed=4)], ids=["no sinks", "sinks"])
def test_a_length_of_0_leaves_a_query_nothing(sinks, show):
    opened = show(explained(ch.Lengths([2, 5]), sinks=sinks))
    type_into(opened, "mask_lengths", 0, 0, "0")
    later = {step.name: step.value for step in explained(ch.Lengths([0, 5]), sinks=sinks).steps}
    for name in ("masked", "maximum", "numerator", "total", "weights", "output"):
        torch.testing.assert_close(numbers(opened, name), later[name].double(), rtol=1e-6, atol=1e-6, msg=name)
    assert not numbers(opened, "output")[0].any()
    assert opened.page.evaluate("clearhead.sentence('maximum', [0, 0, 0, 0])") == "maximum[0, 0, 0] = 0"


def test_a_query_that_saw_nothing_may_see_something(show):
    opened = show(explained(ch.Lengths([0, 5])))
    type_into(opened, "mask_lengths", 0, 0, "3")
    check(opened, explained(ch.Lengths([0, 5])), mask_lengths=torch.tensor([3, 5]).view(2, 1, 1, 1))
    output = ch.attention(QUERY, KEY, VALUE, mask=ch.Lengths([3, 5]))
    torch.testing.assert_close(numbers(opened, "output"), output.double(), rtol=1e-6, atol=1e-6)


BAD = ["", "abc", "2.5", "2,5", "1e0", "-1", "6", "9" * 400, "NaN", "inf", "0x1", "1_0", "--3", "½", "٣"]


@pytest.mark.parametrize("typed", BAD)
def test_what_is_no_length_is_refused(typed, show):
    opened = show(explained(ch.Lengths([2, 5])), "#step=mask_lengths")
    cell(opened, "mask_lengths", 0, 0).click()
    opened.page.locator("td input").fill(typed)
    opened.page.keyboard.press("Enter")
    assert opened.page.locator("#said").inner_text() == f"“{typed}” is no whole number from 0 to 5."
    assert opened.page.locator("td input[aria-invalid]").count() == 1
    opened.page.keyboard.press("Escape")
    assert opened.page.locator("td input").count() == 0
    same(opened, explained(ch.Lengths([2, 5])), 0)
    assert opened.page.get_by_role("button", name="reset").is_disabled()


@pytest.mark.parametrize("typed", ["-0", "+3", " 4 ", "005"])
def test_other_ways_to_write_a_whole_number(typed, show):
    opened = show(explained(ch.Lengths([2, 5])), "#step=mask_lengths")
    cell(opened, "mask_lengths", 0, 0).click()
    opened.page.locator("td input").fill(typed)
    opened.page.keyboard.press("Enter")
    assert cell(opened, "mask_lengths", 0, 0).inner_text() == str(int(typed))


@pytest.mark.parametrize(
    ("mask", "align", "edits", "later"),
    [
        (ch.PrefixLM([1, 2]), 1, [("mask_lengths", 0, 0, 4, 0), ("mask_lengths", 0, 0, 0, 1)], ch.PrefixLM([4, 0])),
        (
            ch.Documents([0, 0, 1, 1, 1]), 1,
            [("mask_key_ids", 0, 0, 7, 0), ("mask_query_ids", 2, 0, 0, 0), ("mask_key_ids", 0, 3, -12, 0)],
            None,
        ),
        (ch.Causal(), 1, [("mask_queries", 1, 0, 4, 0), ("mask_keys", 0, 4, 1, 0)], None),
        (ch.FirstKeys(2), 1, [("mask_count", 0, 0, 3, 0)], ch.FirstKeys(3)),
        (ch.SlidingWindow(before=1), 1, [("mask_queries", 0, 0, -3, 0), ("mask_keys", 0, 0, 2, 0)], None),
        (
            ch.Causal() & ch.Lengths([3, 5]), 2,
            [("mask_right_lengths", 0, 0, 4, 1), ("mask_left_keys", 0, 1, 4, 0)], None,
        ),
    ],
    ids=["prefix", "documents", "causal", "first keys", "window", "both"],
)  # fmt: skip
def test_positions_ids_and_prefixes(mask, align, edits, later, show):
    explanation = explained(mask, align=align)
    opened, changed = show(explanation), {}
    for name, row, column, value, sequence in edits:
        type_into(opened, name, row, column, str(value), sequence)
        tensor = changed.get(name, value_of(explanation, name))
        lead = (min(sequence, tensor.shape[0] - 1), 0, row) if tensor.ndim > 1 else ()
        changed[name] = with_entry(tensor, (*lead, column), value)
    check(opened, explanation, **changed)
    if later is not None:
        output = ch.attention(QUERY, KEY, VALUE, mask=later, align=align)
        torch.testing.assert_close(numbers(opened, "output"), output.double(), rtol=1e-6, atol=1e-6)


def test_every_query_moved_is_another_alignment(show):
    opened = show(explained(ch.Causal(), bias=ch.ALiBi(2), align=0))
    for row in range(3):
        type_into(opened, "mask_queries", row, 0, str(row + 2))
        type_into(opened, "bias_queries", row, 0, str(row + 2))
    output = ch.attention(QUERY, KEY, VALUE, mask=ch.Causal(), bias=ch.ALiBi(2), align=2)
    torch.testing.assert_close(numbers(opened, "output"), output.double(), rtol=1e-6, atol=1e-6)


def test_positions_and_edges_of_biases(show):
    torch.manual_seed(0)
    explanation = explained(None, bias=ch.RelativeBias(2, 8, 20) + ch.ALiBi(2), align=1)
    opened = show(explanation)
    changed = {}
    for name, row, column, value in (
        ("bias_left_queries", 1, 0, 30),
        ("bias_left_edges", 0, 2, 1),  # the edges are no longer in order
        ("bias_left_edges", 0, 0, 3),
        ("bias_right_keys", 0, 4, 0),
    ):
        type_into(opened, name, row, column, str(value))
        tensor = changed.get(name, value_of(explanation, name))
        changed[name] = with_entry(tensor, (0, 0, row, column) if tensor.ndim > 1 else (column,), value)
    check(opened, explanation, **changed)


def test_positions_of_encodings(show):
    x, module = draw(1, 3, 4), nn.SinusoidalPositionalEncoding(4)
    opened = show(ch.explain(module, x))
    for row in range(3):
        edit(opened, "positions", 0, row, str(row + 6))
    same(opened, ch.explain(module, x, offset=6))


def test_positions_of_a_rotation(show):
    torch.manual_seed(0)
    module, x = nn.MultiHeadAttention(4, 2, rotary=nn.RotaryEmbedding(2)).double(), draw(1, 3, 4).double()
    explanation = ch.explain(module, x, x, x)
    opened = show(explanation)
    edit(opened, "query_positions", 0, 1, "17")
    edit(opened, "key_positions", 0, 2, "-4")
    check(
        opened, explanation,
        query_positions=torch.tensor([0, 17, 2]), key_positions=torch.tensor([0, 1, -4]),
    )  # fmt: skip


@pytest.mark.parametrize("number", [2**31, -(2**40), 2**40])
def test_large_whole_numbers_are_exact(number, show):
    explanation = explained(ch.Documents([0, number, number, 1, 1]), align=0)
    opened = show(explanation)
    same(opened, explanation, 0)
    type_into(opened, "mask_query_ids", 0, 0, str(number))
    ids = value_of(explanation, "mask_query_ids")
    check(opened, explanation, mask_query_ids=with_entry(ids, (0, 0, 0, 0), number))


# ---- Masks


def test_a_mask_is_turned_over_cell_by_cell(show):
    keep = draw(3, 5, seed=8) > -0.3
    opened = show(explained(keep))
    for row, column in ((0, 1), (2, 4), (1, 0)):
        turn_over(opened, "mask", row, column)
        keep[row, column] = ~keep[row, column]
    check(opened, explained(draw(3, 5, seed=8) > -0.3), mask=keep)
    output = ch.attention(QUERY, KEY, VALUE, mask=keep)
    torch.testing.assert_close(numbers(opened, "output"), output.double(), rtol=1e-6, atol=1e-6)
    assert opened.page.locator("td.cell.edited").count() == 3


@pytest.mark.parametrize(
    ("mask", "name"),
    [
        (ch.Padding(torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 1, 1]])), "mask"),
        (ch.Causal() | ch.Padding(torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 1, 1]])), "mask_right"),
        (~ch.MaskFunction(lambda b, h, i, j: (b + i + j) % 3 == 0), "mask_inner"),
        (ch.DenseMask(draw(2, 1, 3, 5, seed=8) > -0.3), "mask"),
    ],
    ids=["padding", "joined", "function", "dense"],
)
def test_masks_that_stand_for_several_rows(mask, name, show):
    explanation = explained(mask, align=0)
    opened = show(explanation)
    assert opened.page.evaluate("clearhead.obstacle") == ""
    keep = value_of(explanation, name)
    for sequence, column in ((0, 2), (1, 0), (1, 3)):
        turn_over(opened, name, 0, column, sequence=sequence)
        at = (min(sequence, keep.shape[0] - 1), 0, 0, column)
        keep = with_entry(keep, at, ~keep[at])
    check(opened, explanation, **{name: keep})


def small_masked(keep, **given):
    x = draw(4, 3)
    return ch.explain(x, draw(4, 3, seed=1), x, mask=keep, **given)


@pytest.mark.parametrize("key", ["Enter", " ", "F2"])
def test_a_cell_of_a_mask_by_the_keyboard(key, show):
    keep = torch.eye(4, dtype=torch.bool)
    opened = show(small_masked(keep), "#step=mask")
    cell(opened, "mask", 1, 1).focus()
    for typed in ("ArrowLeft", "7", "-", "."):  # digits turn nothing over
        opened.page.keyboard.press(typed)
    same(opened, small_masked(keep), 0)
    opened.page.keyboard.press(key)
    assert numbers(opened, "mask")[0, 0, 1, 0] == 1
    focused = "document.activeElement.getAttribute('aria-label')"
    assert opened.page.evaluate(focused) == "allowed"
    opened.page.keyboard.press(key)
    assert opened.page.evaluate(focused) == "not allowed"
    same(opened, small_masked(keep), 0)


def test_turned_over_twice_nothing_is_changed(show):
    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    opened = show(small_masked(keep, gradients=True), "#step=masked")
    reset = opened.page.get_by_role("button", name="reset")
    why = opened.page.locator("#cards > section:not([hidden]) .why").last
    assert "here for 6 of 16 pairs" in why.inner_text() and reset.is_disabled()
    turn_over(opened, "mask", 3, 0)
    open_step(opened, "masked")
    assert why.inner_text().startswith("With the numbers first given: ") and reset.is_enabled()
    open_step(opened, "d_query")
    assert opened.page.locator("figure.stale").count() >= 1
    turn_over(opened, "mask", 3, 0)
    assert reset.is_disabled()
    same(opened, small_masked(keep, gradients=True), 0)
    open_step(opened, "d_query")
    assert opened.page.locator("figure.stale").count() == 0


def test_a_recorded_call_s_mask(show):
    model, tokenizer = load(bundled())
    inputs = tokenizer(["The quick brown fox.", "A dog."], return_tensors="pt", padding=True)
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        model(**inputs)
    explanation = seen[2].explain((slice(0, 2), 1))
    opened = show(explanation)
    assert opened.page.evaluate("clearhead.obstacle") == ""
    keep = value_of(explanation, "mask")
    assert not keep.all()
    turn_over(opened, "mask", 0, 1, sequence=1)
    check(opened, explanation, mask=with_entry(keep, (1, 0, 0, 1), False))
    opened.page.evaluate("location.hash = '#step=model_output'")
    opened.until("document.documentElement.dataset.shown", "model_output")
    assert "Of the numbers first given" in opened.page.locator("#cards > section:not([hidden])").inner_text()


def test_where_the_page_cannot_compute_nothing_is_turned_over(show):
    class Own(ch.extend.Score):
        def tile(self, query, key):
            return query @ key.mT

    keep = torch.eye(4, dtype=torch.bool)
    opened = show(small_masked(keep, score=Own()), "#step=mask")
    cell(opened, "mask", 1, 0).click()
    assert numbers(opened, "mask")[0, 0, 1, 0] == 0
    assert opened.page.locator("td.cell.open").count() == 0
    assert "turns a cell" not in opened.page.locator("#note").inner_text()


def test_a_computed_mask_is_not_an_input(show):
    opened = show(explained(ch.Lengths([2, 5])), "#step=mask")
    cell(opened, "mask", 0, 4).click()
    same(opened, explained(ch.Lengths([2, 5])), 0)
    assert "turns a cell" not in opened.page.locator("#note").inner_text()
    assert "type a whole number" in written(opened, "mask_lengths")
    masked = show(small_masked(torch.eye(4, dtype=torch.bool)))
    assert "click to turn it over" in written(masked, "mask")
    assert "turns a cell of a mask over" in masked.page.locator("#note").inner_text()
    assert "turns a cell" not in show(small()).page.locator("#note").inner_text()


def written(opened, step):
    open_step(opened, step)
    return opened.page.locator("#written").inner_text()


def test_the_pages_stay_small():
    pages = [explained(draw(3, 5) > 0), explained(ch.Lengths([2, 5])), example("padding"), EXAMPLES["wide"]()]
    assert max(len(page.html().encode()) for page in pages) < 150_000
