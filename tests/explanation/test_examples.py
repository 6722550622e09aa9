"""The built-in examples, and the figures that were published for known inputs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from recomputed import check_script

import clearhead as ch
from clearhead.base.symbolic.steps import number
from clearhead.explanation.examples import EXAMPLES, example
from clearhead.explanation.of_problem import explain_softmax

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens.json").read_text())


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_adds_up(name):
    explanation = example(name)
    check_script(explanation)
    assert not explanation.shown.left_out
    assert len(EXAMPLES[name].__doc__) <= 64  # a line of the command


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, "meta"], ids=str)
def test_the_caller_s_surroundings_change_no_example(name, default):
    expected, state = str(example(name)), torch.random.get_rng_state()
    if default == "meta":
        torch.set_default_device("meta")
    else:
        torch.set_default_dtype(default)
    try:
        assert str(example(name)) == expected
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_term_of_a_sum_stands_above_it(name):
    """Every number of a written-out line but its result is in a table above, or in the line's own formula."""
    explanation = example(name)
    above = set()
    for part in explanation.to_dict()["parts"]:
        for step in part["steps"]:
            line = step["written_out"].removeprefix(step["name"]).partition("]")[2].rpartition(" = ")[0]
            words = line.replace("(", " ").replace(")", " ").replace("·", " ").replace("²", " ").split()
            for word in words:
                if word.lstrip("-").replace(".", "").isdigit() and "." in word:
                    known = word in above or word.lstrip("-") in above
                    assert known or word in step["formula"], (step["name"], word)
            for table in step["tables"]:
                above |= {number(float(x)) for row in table["cells"] for x in row}


def test_no_example_of_this_name():
    with pytest.raises(ch.ClearheadError, match="no example is called 'dots'; the examples are dot, masked-softmax"):
        example("dots")


def found_in(text, numbers):
    """Whether the text has each of these numbers, to the digits that it shows."""
    return [x for x in np.asarray(numbers, dtype=float).flatten() if number(float(x)) not in text]


def test_the_published_scaled_dot_product():
    golden = GOLDENS["scaled_dot_product"]
    query, key, value = (torch.tensor(golden[name]) for name in ("query", "key", "value"))
    text = str(ch.explain(query, key, value))
    for name in ("scores", "weights", "output", "softmax_over_the_wrong_axis"):
        assert not found_in(text, golden[name]), name


def test_the_published_alignment():
    golden = GOLDENS["additive_alignment"]
    draw = np.random.RandomState(42).randn
    encoder, decoder, layer_1, layer_2 = draw(5, 16), draw(1, 16), draw(32, 10), draw(10, 1)
    score = ch.Additive.from_concatenated(layer_1.T, layer_2[:, 0], order="key_query")
    explanation = ch.explain(decoder, encoder, encoder, score=score)
    np.testing.assert_allclose(explanation["scores"][0], golden["scores"], rtol=1e-6)
    np.testing.assert_allclose(explanation["output"][0], golden["context"], rtol=1e-6)
    text = explanation.markdown().replace("\\", "")
    for name in ("scores", "weights", "context"):
        assert not found_in(text, golden[name]), name


@pytest.mark.parametrize("lengths", [[2, 3], [[1, 3], [2, 4]]], ids=str)
def test_the_masked_softmax(lengths):
    scores = torch.rand(2, 2, 4, generator=torch.Generator().manual_seed(0))
    explanation = explain_softmax(scores, ch.Lengths(lengths))
    torch.testing.assert_close(explanation["weights"], ch.masked_softmax(scores, lengths))
    check_script(explanation)
