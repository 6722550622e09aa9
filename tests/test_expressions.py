"""Every operation of expressions: its line of PyTorch, its formula, its numbers and its gradient come to one value."""

import itertools
import math
import re

import pytest
import torch

from clearhead.base.symbolic.expressions import (
    OPERATIONS,
    Unsaid,
    call,
    cat,
    code_of,
    flows,
    formula_of,
    side_by_side,
    tree_of,
    written,
)
from clearhead.base.symbolic.formulas import View
from clearhead.base.symbolic.steps import Step, made


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).abs() + 0.1


def step(name, value, *axes):
    return Step(name, "Given.", value, axes)


X, Y = step("x", draw(3, 4), "Lq", "E"), step("y", draw(5, 4, seed=1), "Lk", "E")
PLACES = step("places", torch.tensor([[0, 3], [1, 1], [2, 0]]), "Lq", "Lk")
V, B = step("v", draw(4, seed=2), "E"), step("b", draw(3, 1, seed=3), "Lq", "1")
EXPRESSIONS = {
    "add": X + B, "sub": X - V, "mul": X * B, "div": X / V, "pow": X**2, "neg": -X, "square": X.square(),
    "exp": (X - B).exp(), "tanh": X.tanh(), "sin": X.sin(), "cos": X.cos(), "sqrt": X.sqrt(), "abs": (X - B).abs(),
    "maximum": X.maximum(B), "le": X <= B, "lt": X < B, "ge": X >= B, "gt": X > B, "eq": X.eq(X),
    "and": (X > 0.5) & (B > 0.5), "or": (X > 0.5) | (B > 0.5), "not": ~(X > B),
    "masked_fill": X.masked_fill(~(X > B), 0.0), "matmul": X @ Y.mT, "vector": X @ V, "sum": X.sum(-1),
    "sum_keepdim": X.sum(0, keepdim=True), "amax": X.amax(-1), "all": (X > B).all(-1), "any": (X > B).any(-1),
    "vector_norm": X.vector_norm(dim=-1, keepdim=True), "softmax": X.softmax(-1), "softmax_first": X.softmax(0),
    "take_along_dim": X.take_along_dim(PLACES, -1), "mT": X.mT, "T": X.T, "transpose": X.transpose(0, 1),
    "unsqueeze": X.unsqueeze(-2) + Y.unsqueeze(-3), "squeeze": X.unsqueeze(-2).squeeze(1),
    "unflatten": call("unflatten", X, -1, (2, 2), axes=("Lq", "n", "E")), "flatten": (X.unsqueeze(1) * Y).flatten(-2),
    "index": X[..., 1:4:2], "index_list": X[..., [3, 0, 3]], "index_one": X[1, :], "to": X.to(torch.float32),
    "double": X.double(), "cat": cat(X, X[..., :2]), "stack": call("stack", [X, -X], 1), "pad": call("pad", X, (0, 2)),
    "repeat": V.repeat(2), "repeat_interleave": V.repeat_interleave(2), "side_by_side": side_by_side(X, -X),
    "arange": call("arange", 0, 6, 2).double() / 6, "dot": (X @ Y.mT * 0.5).softmax(-1) @ Y, "two": 2 * X + X * X,
    "mean_square": (X.square().sum(-1, keepdim=True) / 4 + 1e-6).sqrt(), "of_two": -(X - (B - V)) / (V * B),
}  # fmt: skip
SPACE = {"torch": torch} | {each.name: each.value for each in (X, Y, V, B, PLACES)}


def test_every_operation_is_tried():
    def names(x):
        return {x["name"]} | {n for each in x["inputs"] for n in names(each)} if x["kind"] == "call" else set()

    tried = set().union(*(names(tree_of(x)) for x in EXPRESSIONS.values())) - {"list"}
    assert tried == set(OPERATIONS)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_the_line_of_pytorch_gives_the_value(name):
    x = EXPRESSIONS[name]
    found = eval(code_of(x).text, dict(SPACE))
    assert torch.equal(found, x.value) and len(x.axes) == x.value.ndim


NUMERIC = {"exp": math.exp, "tanh": math.tanh, "sin": math.sin, "cos": math.cos, "sqrt": math.sqrt, "max": max}


def as_number(text):
    """What a written-out number comes to."""
    text = re.sub(r"\|([^|]*)\|", r"abs(\1)", text.replace("·", "*").replace("²", "**2").replace("^", "**"))
    text = text.replace("√", "sqrt").replace("every(", "every_of(").replace("some(", "some_of(")
    reduced = {"every_of": lambda *found: all(found), "some_of": lambda *found: any(found)}
    return float(eval(text, NUMERIC | reduced))


LOOKED_UP = ("take_along_dim",)  # which name the place in the table


@pytest.mark.parametrize("name", [name for name in EXPRESSIONS if name not in LOOKED_UP])
def test_each_number_written_out_comes_to_the_value(name):
    x = EXPRESSIONS[name]
    for at in itertools.product(*map(range, x.value.shape)):
        text = written(x, at, View(True)).text
        if "…" not in text and "max(" not in text:
            assert as_number(text) == pytest.approx(float(x.value[at]), rel=3e-3, abs=3e-4), (text, at)


@pytest.mark.parametrize("name", [name for name in EXPRESSIONS if EXPRESSIONS[name].value.is_floating_point()])
def test_the_gradient_that_is_said_is_that_of_autograd(name):
    leaves = {each.name: each.value.clone().requires_grad_() for each in (X, Y, V, B)}
    x = EXPRESSIONS[name]
    value = eval(code_of(x).text, SPACE | leaves)
    if not value.requires_grad:
        return
    d = step("d_out", torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).to(value), *x.axes)
    told = []
    for leaf in (X, Y, V, B):
        (wanted,) = torch.autograd.grad(value, leaves[leaf.name], d.value, retain_graph=True, allow_unused=True)
        found = said(x, d, leaf.name)
        if found is not None:
            torch.testing.assert_close(found.expand_as(wanted).to(wanted), wanted, rtol=1e-6, atol=1e-9)
            told.append(leaf.name)
    assert bool(told) == (name not in UNSAID)


UNSAID = {  # no formula says their gradients: then it is the chain rule in general
    "pow", "abs", "maximum", "amax", "vector_norm", "take_along_dim", "unflatten", "index", "index_list", "index_one",
    "cat", "stack", "pad", "repeat", "repeat_interleave", "side_by_side",
}  # fmt: skip


def said(x, d, leaf):
    """What flows to a leaf by the rules of the operations; None where one of them has no rule."""
    try:
        parts = flows(x, made("out", "Of the leaves.", x), d, leaf)
    except Unsaid:
        return None
    return sum(part.value for part in parts) if parts else None


@pytest.mark.parametrize(
    ("x", "axes", "formula"),
    [
        (X @ Y.mT, ("Lq", "Lk"), "out[i, j] = Σ_d x[i, d] · y[j, d]"),
        (X / B * 0.5, ("Lq", "E"), "out[i, d] = x[i, d] / b[i] · 0.5000"),
        ((X - V).square().sum(-1), ("Lq",), "out[i] = Σ_d (x[i, d] - v[d])²"),
        (X.softmax(0), ("Lq", "E"), "out[i, d] = exp(x[i, d]) / Σ_k exp(x[k, d])"),
        (X.masked_fill(~(X > B), 0.0), ("Lq", "E"), "out[i, d] = x[i, d] if x[i, d] > b[i] else 0"),
        (X.masked_fill(X > B, 0.0), ("Lq", "E"), "out[i, d] = x[i, d], and 0 where x[i, d] > b[i]"),
        (cat(-X[..., 2:], X[..., :2]), ("Lq", "E"), "out[i, d] = -x[i, d + 2] for d < 2, x[i, d - 2] for d from 2"),
        (side_by_side(X, -X), ("Lq", "E"), "out[i, 2n] = x[i, n], out[i, 2n + 1] = -x[i, n]"),
        (X * (V - (V - 2 * V)), ("Lq", "E"), "out[i, d] = x[i, d] · (v[d] - (v[d] - 2 · v[d]))"),
    ],
)
def test_formulas(x, axes, formula):
    assert formula_of("out", x, axes) == formula


def test_an_attribute_that_is_no_operation_is_an_error():
    with pytest.raises(AttributeError, match="Step has no fft"):
        X.fft()
