"""The steps of biases, against the engines' own numbers, in plain PyTorch, and on the page."""

import pytest
import torch
from drawn import draw
from opened_page import edit, same
from recomputed import check_script

import clearhead as ch
from clearhead import nn
from clearhead.base.shapes import Sizes
from clearhead.base.symbolic.steps import PAIRS, Step, made
from clearhead.engines.tiled import tiles
from clearhead.problem.problem import make_problem
from clearhead.testing import biases

SIZES = Sizes(2, 3, 4, 6, align=1)
QUERY, KEY, VALUE = draw(2, 3, 4, 5), draw(2, 3, 6, 5, seed=1), draw(2, 3, 6, 2, seed=2)


def learnt(bias, seed=3):
    """The same with other numbers than it is made with."""
    with torch.no_grad():
        for tensor in (*bias.parameters(), *bias.buffers()):
            tensor.copy_(draw(*tensor.shape, seed=seed))
    return bias


FAR = 40  # keys before the first query, so that all of T5's buckets are met
BIASES = {
    "slopes": lambda: ch.ALiBi(3),
    "other slopes": lambda: learnt(ch.ALiBi(3)),
    "buckets": lambda: learnt(ch.RelativeBias(3, num_buckets=8, max_distance=20)),
    "buckets before": lambda: learnt(ch.RelativeBias(3, num_buckets=7, max_distance=11, bidirectional=False)),
    "two": lambda: ch.ALiBi(3) + learnt(ch.RelativeBias(3)),
    "three": lambda: ch.ALiBi(3) + ch.DenseBias(draw(4, 6)) + learnt(ch.RelativeBias(3)),
}
NAMES = {
    "slopes": "queries keys distances places slopes",
    "other slopes": "queries keys distances slopes",
    "buckets": "queries keys apart far edges buckets table",
    "buckets before": "queries keys apart far edges buckets table",
}


@pytest.mark.parametrize("kind", biases(), ids=lambda b: b.__name__)
def test_a_bias_s_steps_end_in_what_it_adds(kind):
    bias = kind.example(SIZES)
    whole = bias(QUERY, KEY, align=1)
    for sides in (
        (slice(1, 2), slice(0, 2), slice(1, 4, 2), slice(0, 6)),
        (slice(0, 2), slice(2, 3), slice(3, 4), slice(None)),
    ):
        last = bias.steps(SIZES, sides, "added")[-1]
        assert last.name == "added"
        torch.testing.assert_close(last.value.expand_as(whole[sides]), whole[sides], rtol=0, atol=0)


@pytest.mark.parametrize("align", ["lower_right", 0, -3, FAR, torch.tensor([2, FAR])], ids=str)
@pytest.mark.parametrize("name", BIASES)
def test_each_step_is_computed_from_those_before_it(name, align):
    bias = BIASES[name]()
    given = {"bias": bias, "align": align}
    explanation = ch.explain(QUERY, KEY, VALUE, **given)
    with torch.no_grad():
        for engine in ("reference", "tiled", "native"):
            output = ch.attention(QUERY, KEY, VALUE, **given, engine=engine)
            torch.testing.assert_close(explanation["output"], output, rtol=1e-5, atol=1e-6)
        by_engine = tiles.finish(make_problem(QUERY, KEY, **given), torch.zeros(2, 3, 4, 6))
        torch.testing.assert_close(explanation["bias"].expand(2, 3, 4, 6), by_engine, rtol=1e-6, atol=1e-7)
    if name in NAMES:
        found = [step.name for step in explanation.steps if step.name.startswith("bias_")]
        assert found == [f"bias_{part}" for part in NAMES[name].split()]
    check_script(explanation)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("sizes", [(4, 3), (5, 3), (8, 20), (32, 128), (32, 17), (33, 10**7), (64, 2**70)], ids=str)
def test_the_edges_of_the_buckets_are_those_of_the_bias(sizes, bidirectional):
    bias = ch.RelativeBias(1, *sizes, bidirectional=bidirectional)
    places = torch.cat([torch.arange(2000), torch.arange(2000, 10**6, 997)])
    for apart in (places, -places):
        far = apart.abs() if bidirectional else (-apart).clamp(min=0)
        half = sizes[0] // 2 if bidirectional else 0
        edges = {step.name: step.value for step in bias.steps(Sizes(1, 1, 1, 1), (slice(None),) * 4)}["bias_edges"]
        buckets = (far.unsqueeze(-1) >= edges).sum(-1) + half * (apart > 0)
        assert torch.equal(buckets, bias.bucket(apart))


def slope_steps(bias):
    heads = len(bias.slopes)
    return {step.name: step.value for step in bias.steps(Sizes(1, heads, 1, 1), (slice(None),) * 4)}


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12])
def test_the_slopes_are_shown_by_their_formula_where_they_follow_it(heads):
    for bias in (ch.ALiBi(heads), ch.ALiBi(heads).double()):
        steps = slope_steps(bias)
        assert torch.equal(steps["bias_slopes"].flatten(), bias.slopes)
        power = max(n for n in (1, 2, 4, 8) if n <= heads)
        assert steps["bias_places"].flatten().tolist()[:power] == list(range(1, power + 1))
        bias.slopes[0] *= 1.01
        assert "bias_places" not in slope_steps(bias)
        bias = ch.ALiBi(heads)
        bias.slopes.requires_grad_()
        assert "bias_places" not in slope_steps(bias)


def test_slopes_that_were_rounded_are_shown_as_they_are():
    whole, powers, others = ch.ALiBi(12).bfloat16(), ch.ALiBi(8), ch.ALiBi(12)
    assert "bias_places" in slope_steps(whole)  # a conversion takes no digits
    powers.slopes, others.slopes = powers.slopes.bfloat16(), others.slopes.bfloat16()
    assert "bias_places" in slope_steps(powers)  # powers of two
    assert "bias_places" not in slope_steps(others)


@pytest.mark.parametrize("name", BIASES)
def test_some_heads_and_queries(name):
    bias = BIASES[name]()
    whole = ch.explain(QUERY, KEY, VALUE, bias=bias, align=2)
    part = ch.explain(QUERY, KEY, VALUE, bias=bias, align=2, at=(1, slice(1, 3), slice(1, 4, 2)))
    torch.testing.assert_close(part["weights"], whole["weights"][1:, 1:, 1::2], rtol=1e-5, atol=1e-6)
    check_script(part)


def test_a_query_of_many_keys_costs_a_few_rows():
    length = 5000
    x = draw(1, 2, length, 4)
    for bias in (ch.ALiBi(2), ch.RelativeBias(2)):
        explanation = ch.explain(x, x, x, bias=bias, at=(0, 1, 4321))
        assert max(step.value.numel() for step in explanation.steps) <= 4 * length
        weights = ch.weights(x, x, bias=bias)[0, 1, 4321]
        torch.testing.assert_close(explanation["weights"][0, 0, 0], weights.detach(), rtol=1e-4, atol=1e-7)


class Doubled(ch.ALiBi):
    def lower(self, sizes):
        added = super().lower(sizes)
        return added._replace(relative=2 * added.relative)


@pytest.mark.parametrize("change", [lambda b: b, lambda b: b + ch.DenseBias(draw(4, 6))], ids=["itself", "+"])
def test_a_bias_that_changes_another_one_is_not_shown_by_that_one_s_steps(change):
    given = {"bias": change(Doubled(3)), "align": 1}
    explanation = ch.explain(QUERY, KEY, VALUE, **given)
    torch.testing.assert_close(explanation["output"], ch.attention(QUERY, KEY, VALUE, **given))
    assert not any("slopes" in step.name for step in explanation.steps)
    check_script(explanation)


@pytest.mark.parametrize("bias", [ch.DenseBias(draw(4, 6)), ch.BiasFunction(lambda b, h, i, j: (i - j) / 2)], ids=str)
def test_a_bias_without_steps_is_shown_as_it_is(bias):
    explanation = ch.explain(QUERY, KEY, VALUE, bias=bias)
    assert [step.name for step in explanation.steps if step.name.startswith("bias")] == ["bias"]
    torch.testing.assert_close(explanation["output"], ch.attention(QUERY, KEY, VALUE, bias=bias))


def test_a_float_mask_beside_a_bias_is_added_too():
    mask = draw(4, 6, seed=5)
    explanation = ch.explain(QUERY, KEY, VALUE, mask=mask, bias=ch.ALiBi(3), align=0)
    assert torch.equal(explanation["bias_right"].expand(2, 3, 4, 6), mask.expand(2, 3, 4, 6))
    output = ch.attention(QUERY, KEY, VALUE, mask=mask, bias=ch.ALiBi(3), align=0)
    torch.testing.assert_close(explanation["output"], output, rtol=1e-5, atol=1e-6)
    for other in (ch.Lengths(4), mask > 0):
        names = [s.name for s in ch.explain(QUERY, KEY, VALUE, mask=other, bias=ch.ALiBi(3), align=0).steps]
        assert "bias_slopes" in names and "bias_right" not in names


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32), (torch.bfloat16,) * 2]
)
def test_other_precisions_of_biases(dtypes):
    inputs, bias = [t.to(dtypes[0]) for t in (QUERY, KEY, VALUE)], learnt(ch.RelativeBias(3)).to(dtypes[1])
    explanation = ch.explain(*inputs, bias=bias, align=0)
    output = ch.attention(*inputs, bias=bias, align=0, engine="reference").detach()
    tolerance = 1e-2 if dtypes[0] == torch.bfloat16 else 1e-6
    torch.testing.assert_close(explanation["output"].to(dtypes[0]), output, rtol=tolerance, atol=tolerance)
    check_script(explanation)


def test_whole_numbers_are_written_out_as_whole_numbers():
    text = " ".join(str(ch.explain(QUERY[0, 0], KEY[0, 0], VALUE[0, 0], bias=ch.ALiBi(1), align=2)).split())
    assert "bias_distances[0, 0] = |0 - 2| = 2 " in text
    assert "bias[0, 0] = -0.003906·2 = -0.007812" in text


# ---- Gradients


@pytest.mark.parametrize("name", ["other slopes", "buckets"])
def test_what_is_learnt_has_its_gradient(name):
    bias = BIASES[name]()
    if name != "buckets":
        next(bias.buffers()).requires_grad_()
    (tensor,) = (t for t in (*bias.parameters(), *bias.buffers()) if t.requires_grad)
    explanation = ch.explain(QUERY, KEY, VALUE, bias=bias, align=1, gradients=True)
    ch.attention(QUERY, KEY, VALUE, bias=bias, align=1, engine="reference").sum().backward()
    if name == "buckets":
        mine = explanation["d_bias_table"][0, :, 0].T
    else:
        mine = explanation["d_bias_slopes" if name == "other slopes" else "d_bias_table"].reshape(tensor.shape)
    torch.testing.assert_close(mine, tensor.grad, rtol=1e-4, atol=1e-6)
    check_script(explanation)


# ---- Modules and recorded calls


def test_a_module_s_bias_has_its_steps():
    torch.manual_seed(0)
    module, x = nn.MultiHeadAttention(6, 3), draw(2, 4, 6)
    for bias in (ch.ALiBi(3), learnt(ch.RelativeBias(3))):
        explanation = ch.explain(module, x, x, x, mask=ch.Causal(), bias=bias)
        assert torch.equal(
            explanation["bias"].expand(2, 3, 4, 4), bias(draw(2, 3, 4, 1), draw(2, 3, 4, 1)).detach().expand(2, 3, 4, 4)
        )
        assert len([step for step in explanation.steps if step.name.startswith("bias_")]) > 4
        with torch.no_grad():
            torch.testing.assert_close(explanation["result"], module(x, x, x, mask=ch.Causal(), bias=bias))
        check_script(explanation)


class Model(torch.nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.attend, self.bias = nn.MultiHeadAttention(6, 3), bias

    def forward(self, x):
        return self.attend(x, x, x, mask=ch.Causal(), bias=self.bias)


@pytest.mark.parametrize("name", ["slopes", "other slopes", "buckets", "two"])
def test_a_recorded_call_s_bias_has_its_steps(name, tmp_path):
    bias = BIASES[name]()
    model, x = Model(bias), draw(2, 8, 6)
    added = model.bias(draw(2, 3, 8, 1), draw(2, 3, 8, 1)).detach()
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        model(x)
    learnt(bias, seed=9)  # the record has a copy
    explanation = seen[0].explain()
    assert torch.equal(explanation["bias"].expand_as(added), added)
    assert len([step for step in explanation.steps if step.name.startswith("bias_")]) > 3
    torch.testing.assert_close(explanation["output"], seen[0].output, rtol=1e-5, atol=1e-6)
    check_script(explanation)
    if name != "two":
        again = ch.models.load_recording(seen.write(tmp_path / "seen.safetensors"))[
            0
        ].explain()  # which holds the numbers alone
        assert torch.equal(again["bias"].expand_as(added), added)


class Attribute(ch.extend.Bias):
    """A bias with steps, over a tensor that is neither a parameter nor a buffer, so that no copy of it is made."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def lower(self, sizes):
        return ch.extend.Added(relative=self.table[None, None])

    def steps(self, sizes, at, name="bias"):
        table = Step(f"{name}_table", "Its numbers.", self._compute_part(sizes, at), PAIRS)
        return [table, made(name, "The same.", table * 1.0, PAIRS)]


def test_a_recorded_bias_that_was_written_to_is_shown_by_the_numbers_of_the_call():
    table = draw(15, seed=4)
    model, x = Model(Attribute(table)), draw(2, 8, 6)
    with torch.no_grad(), ch.watch(model) as seen:
        model(x)
    added = model.bias(draw(8, 1), draw(8, 1)).clone()
    assert "bias_table" in [step.name for step in seen[0].explain().steps]
    table += 1
    explanation = seen[0].explain()
    assert "bias_table" not in [step.name for step in explanation.steps]
    assert torch.equal(explanation["bias"].expand(2, 3, 8, 8), added.expand(2, 3, 8, 8))


def test_a_matrix_beside_a_bias_is_not_kept_twice():
    x = draw(1, 64, 6)
    model = Model(ch.ALiBi(3) + ch.DenseBias(draw(3, 64, 64)[None]))
    with torch.no_grad(), ch.watch(model) as seen:
        model(x)
    assert seen[0].problem.bias.given is None
    assert "bias_slopes" not in [step.name for step in seen[0].explain((0, 1, 5)).steps]


# ---- The page


@pytest.mark.parametrize("name", BIASES)
def test_the_page_computes_every_step_of_a_bias(name, show):
    explanation = ch.explain(QUERY, KEY, VALUE, bias=BIASES[name](), align=torch.tensor([2, FAR]))
    opened = show(explanation)
    assert opened.page.evaluate("clearhead.obstacle") == ""
    same(opened, explanation, 0)
    same(opened, explanation, hook="computed")


def test_edited_slopes_and_tables_give_what_python_gives(show):
    slopes, table = ch.ALiBi(3), learnt(ch.RelativeBias(3, 8, 20))
    slopes.slopes.requires_grad_()  # shown as they are
    opened = show(ch.explain(QUERY, KEY, VALUE, bias=slopes + table, align=2))
    edit(opened, "bias_left_slopes", 0, 0, "0.75")
    edit(opened, "bias_right_table", 0, 5, "-1.5")
    with torch.no_grad():
        slopes.slopes[0], table.weight[5, 0] = 0.75, -1.5
    same(opened, ch.explain(QUERY, KEY, VALUE, bias=slopes + table, align=2))


def test_a_looked_up_number_is_written_out(show):
    explanation = ch.explain(QUERY, KEY, VALUE, bias=BIASES["buckets"](), align=2)
    opened = show(explanation, "#step=bias")
    bucket = int(explanation["bias_buckets"][0, 0, 1, 4])
    number = f"{float(explanation['bias_table'][0, 2, 0, bucket]):.4f}"
    assert opened.page.evaluate("clearhead.sentence('bias', [0, 2, 1, 4])") == f"bias[0, 2, 1, 4] = {number}"
    assert (
        opened.page.evaluate("clearhead.sentence('bias_apart', [0, 0, 1, 5])") == "bias_apart[0, 0, 1, 5] = 5 - 3 = 2"
    )
    edges = " + ".join(f"(1 ≥ {edge})" for edge in explanation["bias_edges"].tolist())
    sentence = opened.page.evaluate("clearhead.sentence('bias_buckets', [0, 0, 1, 4])")
    assert sentence == f"bias_buckets[0, 0, 1, 4] = {edges} + 4·(1 > 0) = {bucket}"
    opened.page.locator("section.card:visible figure:not(.operand) tbody tr").nth(1).locator("td").nth(4).hover()
    lit = opened.page.locator("section.card:visible figure.operand td[class*=tone-]")
    assert lit.count() == 2  # the number of the table, and the bucket that named it


def test_the_page_of_a_long_call_shows_its_bias(show):
    x = draw(1, 2, 300, 4)
    bias = learnt(ch.RelativeBias(2, num_buckets=100, max_distance=1000))
    explanation = ch.explain(x, x, x, bias=bias, at=(0, 1, 250))
    assert len(explanation.html().encode()) < 150_000
    opened = show(explanation, "#step=bias", viewport={"width": 390, "height": 800})
    assert "64 of 300 keys" in opened.page.locator("#left-out").inner_text()
    for _ in range(20):
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
        opened.page.keyboard.press("k")
