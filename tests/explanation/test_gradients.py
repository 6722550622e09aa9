"""Gradients of every step, held to autograd through attention itself, and to the scripts."""

import itertools
import re

import pytest
import torch
from drawn import draw
from recomputed import check_script

import clearhead as ch
from clearhead import nn
from clearhead.testing import scores


@pytest.mark.parametrize("score", scores(), ids=lambda s: s.__name__)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_what_flows_back_is_the_gradient_of_attention(score, sinks):
    score, query_dim, key_dim = score.example()
    inputs = {
        "query": draw(2, 2, 3, query_dim),
        "key": draw(2, 2, 4, key_dim, seed=1),
        "value": draw(2, 2, 4, 5, seed=2),
    }
    given = {"score": score, "mask": ch.Lengths([2, 4]), "bias": draw(2, 2, 3, 4, seed=3)}
    if sinks:
        given["sinks"] = draw(2, seed=4)
    grad = draw(2, 2, 3, 5, seed=5)
    explanation = ch.explain(*inputs.values(), **given, gradients=grad)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
    beside = {name: t.clone().requires_grad_() if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    wanted = leaves | {name: t for name, t in beside.items() if isinstance(t, torch.Tensor)}
    names = {"sinks": "sink"}
    parameters = dict(score.named_parameters())
    output = ch.attention(*leaves.values(), **beside, engine="reference")
    theirs = torch.autograd.grad(output, [*wanted.values(), *parameters.values()], grad)
    for name, expected in zip([*wanted, *parameters], theirs, strict=True):
        mine = explanation[f"d_{names.get(name, name)}"]
        torch.testing.assert_close(mine.reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)
    assert not any(step.value.requires_grad for step in explanation.steps)
    check_script(explanation)


def test_the_formulas_of_weights_and_scores():
    query, key, value, grad = draw(2, 4), draw(3, 4, seed=1), draw(3, 2, seed=2), draw(2, 2, seed=3)
    explanation = ch.explain(query, key, value, gradients=grad)
    weights = explanation["weights"]
    d_weights = grad @ value.T
    torch.testing.assert_close(explanation["d_weights"], d_weights)
    torch.testing.assert_close(explanation["d_value"], weights.T @ grad)
    mean = (weights * d_weights).sum(-1, keepdim=True)
    torch.testing.assert_close(explanation["d_scores"], weights * (d_weights - mean), rtol=1e-4, atol=1e-6)


def test_the_formulas_of_query_key_and_mask():
    query, key, value = draw(2, 4), draw(3, 4, seed=1), draw(3, 2, seed=2)
    explanation = ch.explain(query, key, value, mask=ch.Lengths(2), gradients=draw(2, 2, seed=3))
    formulas = {step.name: step.formula for step in explanation.steps}
    assert formulas["d_query"] == "d_query[i, d] = Σ_j d_products[i, j] · key[j, d]"
    torch.testing.assert_close(explanation["d_query"], explanation["d_products"] @ key)
    assert formulas["d_key"] == "d_key[j, d] = Σ_i d_products[i, j] · query[i, d]"
    torch.testing.assert_close(explanation["d_key"], explanation["d_products"].T @ query)
    assert formulas["d_products"] == "d_products[i, j] = d_scores[i, j] · 0.5000"
    torch.testing.assert_close(explanation["d_products"], explanation["d_scores"] * 0.5)
    assert formulas["d_scores"] == "d_scores[i, j] = d_masked[i, j] if mask[i, j] else 0"
    seen = torch.tensor([True, True, False])
    torch.testing.assert_close(explanation["d_scores"], explanation["d_masked"].masked_fill(~seen, 0.0))


def as_python(formula, numbers):
    """The right-hand side of a formula, in Python; a sum runs up to the bracket that closes around it."""
    text = formula.split(" = ", 1)[1].replace("·", "*").replace("²", "**2")
    while "Σ_" in text:
        start = text.rindex("Σ_")
        letter, depth, end = text[start + 2], 0, start
        while end < len(text) and depth >= 0:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += depth >= 0
        term = text[start + 3 : end]
        name, places = next(m for m in re.findall(r"(\w+)\[([^]]*)\]", term) if letter in m[1].split(", "))
        size = numbers[name].shape[places.split(", ").index(letter)]
        text = f"{text[:start]}sum({term.strip()} for {letter} in range({size})){text[end:]}"
    return text


def check_formula(step, numbers):
    """The formula of a gradient, evaluated number by number, in one sequence and head."""
    letters = re.match(r"\w+\[([^]]*)\] = ", step.formula)[1].split(", ")
    expression, mine = compile(as_python(step.formula, numbers), step.formula, "eval"), numbers[step.name]
    for at in itertools.product(*map(range, mine.shape)):
        found = eval(expression, numbers | dict(zip(letters, at, strict=True)))
        assert float(found) == pytest.approx(float(mine[at]), rel=2e-3, abs=1e-5), (step.formula, at)


MORE = {
    "plain": {},
    "bias": {"bias": draw(2, 2, 3, 4, seed=3)},
    "a bias for all": {"bias": draw(3, 4, seed=3)},
    "sinks": {"sinks": draw(2, seed=4)},
    "dropout": {"dropout_p": 0.5},
}


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("mask", [None, ch.Lengths([2, 4])], ids=["no mask", "mask"])
@pytest.mark.parametrize("score", scores(), ids=lambda s: s.__name__)
def test_every_formula_of_a_gradient_comes_to_its_numbers(score, mask, more):
    score, query_dim, key_dim = score.example()
    inputs = [draw(2, 2, 3, query_dim), draw(2, 2, 4, key_dim, seed=1), draw(2, 2, 4, 5, seed=2)]
    explanation = ch.explain(*inputs, score=score, mask=mask, **MORE[more], gradients=draw(2, 2, 3, 5, seed=5))
    numbers = {}
    for step in explanation.steps:
        lead = zip(step.axes, step.value.shape, strict=True)
        inside = [min(int(axis == "H"), n - 1) for axis, n in lead if axis in ("B", "H")]
        value = step.value[tuple(inside)]  # of sequence 0, some of whose keys are masked, and head 1
        numbers[step.name] = value.expand([{"Lq": 3, "Lk": 4}.get(axis, -1) for axis in step.axes[len(inside) :]])
    said = [
        step for step in explanation.steps if step.name.startswith("d_") and step.formula and "∂" not in step.formula
    ]
    for step in said:
        check_formula(step, numbers)
    names = {step.name for step in said}
    assert {"d_weights", "d_value", "d_scores"} <= names
    assert ("d_dropped" in names) == (more == "dropout") and ("d_masked" in names) == (mask is not None)
    assert ("d_unbiased" in names) == ("bias" in more) and ("d_bias" in names) == (more == "bias")
    own = {"Dot": {"query", "key", "products"}, "Bilinear": {"query", "key", "turned"}}
    own |= {"Cosine": {"unit_query", "unit_key", "cosines"}, "Gaussian": {"squared"}, "ScoreFunction": set()}
    own["Additive"] = {"query", "key", "projected_query", "projected_key", "pairs", "hidden"}
    kind = type(score).__name__
    assert {f"d_{name}" for name in own[kind] if name != "products" or "bias" not in more} <= names


@pytest.mark.parametrize("at", [None, (0, 1), (0, slice(0, 3, 2), 2)], ids=str)
def test_a_module_s_inputs_and_parameters(at):
    torch.manual_seed(0)
    module, x = nn.MultiHeadAttention(6, 3, rotary=nn.RotaryEmbedding(2)), draw(1, 3, 6)
    explanation = ch.explain(module, x, x, x, mask=ch.Causal(), at=at, gradients=True)
    check_script(explanation)
    assert all(p.grad is None for p in module.parameters())
    if at is None:
        leaf = x.clone().requires_grad_()
        module(leaf, leaf, leaf, mask=ch.Causal()).sum().backward()
        torch.testing.assert_close(explanation["d_x"], leaf.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(explanation["d_W_key"], module.W_k.weight.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(explanation["d_b_output"], module.W_o.bias.grad, rtol=1e-4, atol=1e-5)


def test_padding_adds_nothing_to_output_or_gradient():
    key = draw(2, 3, 4)
    explanation = ch.explain(draw(2, 2, 4, seed=1), key, key, mask=ch.Lengths([2, 3]), gradients=True)
    assert torch.equal(explanation["other_padding"], explanation["output"])
    assert not explanation["d_key"][0, 2].any() and not explanation["d_value"][0, 2].any()
    assert explanation["d_key"][1, 2].any()
    one = ch.explain(draw(2, 4, seed=1), key[0], key[0], mask=ch.Lengths(2), gradients=True)
    assert "1 of 3 keys got 0: no query sees them" in " ".join(str(one).split())


def test_under_inference_mode_and_no_grad():
    query = draw(2, 4)
    expected = ch.explain(query, query, query, gradients=True)["d_query"]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(ch.explain(query, query, query, gradients=True)["d_query"], expected)
            assert torch.equal(ch.explain(query.clone(), query, query, gradients=True)["d_query"], expected)


def test_numpy():
    query = draw(2, 4)
    expected = ch.explain(query, query, query, gradients=True)
    arrays = ch.explain(*[query.numpy()] * 3, gradients=torch.ones(2, 4).numpy())
    assert torch.equal(torch.from_numpy(arrays["weights"]), expected["weights"])


def test_a_gradient_of_another_shape_is_an_error():
    query = draw(2, 4)
    with pytest.raises(
        ch.ShapeError, match=r"gradients has shape \(3, 4\); expected that of the step output, \(2, 4\)"
    ):
        ch.explain(query, query, query, gradients=torch.ones(3, 4))


def test_one_tensor_in_three_roles_has_a_gradient_for_each():
    x = draw(3, 4)
    apart = ch.explain(x, x.clone(), x.clone(), gradients=True)
    together = ch.explain(x, x, x, gradients=True)
    check_script(together)
    for name in ("d_query", "d_key", "d_value"):
        assert torch.equal(together[name], apart[name])


def test_heads_that_share_a_key_head_share_the_gradient_of_its_weights():
    torch.manual_seed(0)
    module, x = nn.MultiHeadAttention(6, 6, head_dim=2, num_kv_heads=2), draw(1, 3, 6)
    explanation = ch.explain(module, x, x, x, gradients=True)
    module(x, x, x).sum().backward()
    for name, layer in (("key", module.W_k), ("value", module.W_v)):
        torch.testing.assert_close(explanation[f"W_{name}"], layer.weight.detach(), rtol=0, atol=0)
        torch.testing.assert_close(explanation[f"d_W_{name}"], layer.weight.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(explanation[f"d_b_{name}"], layer.bias.grad, rtol=1e-4, atol=1e-5)
    check_script(explanation)
