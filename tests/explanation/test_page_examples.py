"""The pages of the built-in examples, of modules, of gradients and of recorded calls."""

import pytest
import torch
from drawn import draw
from opened_page import LUMINANCE, TEXTS, all_numbers, edit, fits, numbers, same, small

import clearhead as ch
from clearhead import nn
from clearhead.explanation.examples import EXAMPLES, example, explain_online_softmax
from clearhead.models import bundled, load


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_built_in_example_is_computed(name, show):
    explanation = example(name)
    opened = show(explanation, viewport={"width": 390, "height": 800})
    assert opened.page.evaluate("clearhead.obstacle") == ""
    same(opened, explanation, 0)
    same(opened, explanation, hook="computed")
    assert len(explanation.html().encode()) < 150_000
    fits(opened, 390)
    for _ in range(2):
        assert [row for row in opened.page.locator(TEXTS).evaluate_all(LUMINANCE) if row[0] < 4.5] == []
        opened.page.locator("#theme").click()


def multi_head(rotary=None, heads=2, kv_heads=None, head_dim=2):
    torch.manual_seed(3)
    return nn.MultiHeadAttention(4, heads, head_dim=head_dim, num_kv_heads=kv_heads, rotary=rotary).double()


ROTARY = {
    "none": lambda: multi_head(),
    "halves": lambda: multi_head(nn.RotaryEmbedding(4), head_dim=4),
    "interleaved": lambda: multi_head(nn.RotaryEmbedding(4, interleaved=True), head_dim=4),
    "some entries": lambda: multi_head(nn.RotaryEmbedding(2, interleaved=True), head_dim=6),
    "shared": lambda: multi_head(nn.RotaryEmbedding(2), heads=4, kv_heads=2),
}


@pytest.mark.parametrize("name", ROTARY)
def test_multi_head_attention_follows_its_input_and_its_weights(name, show):
    mask = ch.Causal() if list(ROTARY).index(name) % 2 else None
    module, x = ROTARY[name](), draw(1, 3, 4).double()
    opened = show(ch.explain(module, x, x, x, mask=mask))
    assert opened.page.evaluate("clearhead.obstacle") == ""
    edit(opened, "x", 1, 2, "1.5")
    edit(opened, "W_query", 0, 1, "-2")
    edit(opened, "W_key", 3, 0, "0.75")
    edit(opened, "W_value", 1, 1, "3")
    edit(opened, "W_output", 2, 0, "-0.5")
    x[0, 1, 2] = 1.5
    with torch.no_grad():
        for layer, row, column, value in (
            ("W_q", 0, 1, -2),
            ("W_k", 3, 0, 0.75),
            ("W_v", 1, 1, 3),
            ("W_o", 2, 0, -0.5),
        ):
            getattr(module, layer).weight[row, column] = value
    same(opened, ch.explain(module, x, x, x, mask=mask))
    with torch.no_grad():
        torch.testing.assert_close(numbers(opened, "result"), module(x, x, x, mask=mask), rtol=1e-6, atol=1e-6)


def test_some_heads_and_queries_are_computed_beside_the_others(show):
    module, x = multi_head(heads=3), draw(1, 4, 4).double()
    opened = show(ch.explain(module, x, x, x, at=(0, 1, slice(1, 3))))
    assert opened.page.evaluate("clearhead.obstacle") == ""
    same(opened, ch.explain(module, x, x, x, at=(0, 1, slice(1, 3))), hook="computed")


POSITIONS = {
    "sines": nn.SinusoidalPositionalEncoding(5),
    "rotary": nn.RotaryEmbedding(4),
    "rotary, interleaved": nn.RotaryEmbedding(4, interleaved=True),
    "learnt": nn.LearnedPositionalEncoding(9, 5),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_follow_their_input(name, show):
    x = draw(2, 3, 4, 5)
    opened = show(ch.explain(POSITIONS[name], x))
    assert opened.page.evaluate("clearhead.obstacle") == ""
    same(opened, ch.explain(POSITIONS[name], x), hook="computed")
    edit(opened, "x", 1, 2, "-4")
    x[0, 0, 1, 2] = -4
    same(opened, ch.explain(POSITIONS[name], x))
    assert opened.page.locator("tbody th").nth(1).inner_text() == "position 1"


def test_the_example_of_positions_follows_its_input(show):
    explanation = example("positional")
    opened = show(explanation)
    edit(opened, "x", 3, 0, "2.5")
    x = explanation["x"].clone()
    x[3, 0] = 2.5
    same(opened, ch.explain(nn.SinusoidalPositionalEncoding(4), x))


def test_the_example_of_the_online_softmax_follows_its_scores(show):
    explanation = example("online-softmax")
    opened = show(explanation)
    edit(opened, "scores", 0, 1, "4.5")
    edit(opened, "scores", 1, 3, "-2")
    edit(opened, "value", 2, 1, "3")
    scores, value = explanation["scores"].clone(), explanation["value"].clone()
    scores[0, 1], scores[1, 3], value[2, 1] = 4.5, -2, 3
    same(opened, explain_online_softmax(scores, value, 2))
    assert opened.page.locator("#temperature").is_hidden()  # no one step has all logits


def test_the_temperature_reaches_what_would_happen_otherwise(show):
    explanation = example("masked-softmax")
    opened = show(explanation)
    opened.page.get_by_label("The temperature as a number").fill("0.4")
    opened.page.get_by_label("The temperature as a number").press("Enter")
    late = (explanation["scores"].double() / 0.4).softmax(-1) * explanation["mask"]
    torch.testing.assert_close(numbers(opened, "masked_after")[:, 0], late, rtol=1e-6, atol=1e-6)


# ---- Gradients


def test_gradients_are_of_the_numbers_first_given(show):
    explanation = small(gradients=True)
    opened = show(explanation)
    assert opened.page.evaluate("clearhead.obstacle") == ""
    gradients = [step.name for step in explanation.steps if step.name.startswith("d_")]
    same(opened, explanation, 0)
    card = opened.page.locator("#cards > section:not([hidden])")
    for name in gradients:
        opened.page.evaluate(f"location.hash = '#step={name}'")
        opened.until("document.documentElement.dataset.shown", name)
        assert "numbers first given" not in card.inner_text()
        assert card.locator("td.open").count() == 0
    edit(opened, "query", 1, 2, "2.5")
    for name in gradients:
        opened.page.evaluate(f"location.hash = '#step={name}'")
        opened.until("document.documentElement.dataset.shown", name)
        assert "Of the numbers first given; this page does not compute it again." in card.inner_text()
        assert card.locator("figure.stale").count() >= 1
    query = draw(3, 4)
    query[1, 2] = 2.5
    later = ch.explain(query, draw(4, 4, seed=1), draw(4, 2, seed=2))
    found = all_numbers(opened, [step.name for step in explanation.steps])
    for step in later.steps:
        torch.testing.assert_close(found[step.name], step.value.double(), rtol=1e-6, atol=1e-6)
    for name in gradients:
        assert torch.equal(found[name].squeeze(), explanation[name].double().squeeze())
    opened.page.get_by_role("button", name="reset").click()
    assert card.locator("figure.stale").count() == 0


# ---- Recorded calls


@pytest.fixture(scope="module")
def bert():
    return load(bundled())


def recorded(bert, text):
    model, tokenizer = bert
    inputs = tokenizer(text, return_tensors="pt")
    words = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        model(**inputs)
    return seen, words


def test_a_recorded_call_has_its_words_and_follows_its_inputs(bert, show):
    seen, words = recorded(bert, "The quick brown fox jumps.")
    opened = show(seen[3].explain((0, 5), tokens=words), "#step=weights")
    assert opened.page.evaluate("clearhead.obstacle") == ""
    table = opened.page.locator("#cards > section:not([hidden]) figure:not(.operand)")
    assert table.locator("tbody th").all_inner_texts() == [f"{n} {word}" for n, word in enumerate(words)][:8]
    before = numbers(opened, "output")
    edit(opened, "query", 1, 2, "2.5")
    assert not torch.equal(numbers(opened, "output")[0, 0, 1], before[0, 0, 1])
    opened.page.evaluate("location.hash = '#step=model_output'")
    opened.until("document.documentElement.dataset.shown", "model_output")
    card = opened.page.locator("#cards > section:not([hidden])")
    assert "Of the numbers first given" in card.inner_text()
    assert card.locator("td.open").count() == 0
