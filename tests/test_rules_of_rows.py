"""Rules that read rows of a table, as FlexAttention's mask_mod and score_mod may: each is computed pair by pair."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import and_masks, noop_mask

import clearhead as ch

torch.manual_seed(0)
LABELS, PLACES = torch.rand(32, 3) > 0.6, torch.randn(32, 4)
SPANS, TABLE = torch.tensor([[0, 20], [10, 32]]), torch.randn(1, 2, 32, 32)
MASKS = {
    "any": lambda b, h, i, j: (LABELS[i] & LABELS[j]).any() | (i == j),
    "entry of a row": lambda b, h, i, j: (i >= SPANS[j // 16][0]) & (i < SPANS[j // 16][1]),
    "all": lambda b, h, i, j: torch.all(LABELS[i] == LABELS[j]) | (i == j),
    "elementwise": lambda b, h, i, j: (i >= j) | (LABELS[i, 0] & LABELS[j, h]),
    "number": lambda b, h, i, j: TABLE[b, h, i, j] < 1.0,
    "whole tensors": lambda b, h, i, j: (TABLE < 1.0)[:, :, i.flatten()][..., j.flatten()],
}
SCORES = {
    "sum": lambda s, b, h, i, j: s + (PLACES[i] * PLACES[j]).sum(),
    "norm": lambda s, b, h, i, j: s - (PLACES[i] - PLACES[j]).norm(),
    "dot": lambda s, b, h, i, j: s + torch.dot(PLACES[i], PLACES[j]) / (1 + h),
    "maximum": lambda s, b, h, i, j: torch.stack([s, PLACES[i, 0] * PLACES[j, 1]]).amax(),
    "elementwise": lambda s, b, h, i, j: s + PLACES[i, 0] * PLACES[j, 1],
}
INPUTS = [t.squeeze(0) for t in torch.randn(3, 1, 1, 2, 32, 8).unbind()]


def matrix(rule, *before):
    """A rule at each pair alone, on single numbers."""
    found = [
        torch.stack([rule(*(t[0, h, i, j] for t in before), *map(torch.tensor, (0, h, i, j))) for j in range(32)])
        for h in range(2)
        for i in range(32)
    ]
    return torch.stack(found).view(1, 2, 32, 32)


@pytest.mark.parametrize("engine", [None, "tiled", "reference"])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, engine):
    rule = MASKS[name]
    keep = rule(*(torch.arange(n).view(shape) for n, shape in sides())) if name == "whole tensors" else matrix(rule)
    want = ch.attention(*INPUTS, mask=keep, engine="reference")
    torch.testing.assert_close(ch.attention(*INPUTS, mask=ch.MaskFunction(rule), engine=engine), want)
    joined = ch.Causal() & ch.MaskFunction(rule) | ch.SlidingWindow(before=2, after=0)
    want = ch.attention(*INPUTS, mask=ch.Causal() & ch.DenseMask(keep) | ch.SlidingWindow(before=2, after=0))
    torch.testing.assert_close(ch.attention(*INPUTS, mask=joined, engine=engine), want)


def sides():
    return (1, (-1, 1, 1, 1)), (2, (1, -1, 1, 1)), (32, (1, 1, -1, 1)), (32, (1, 1, 1, -1))


@pytest.mark.parametrize("engine", [None, "tiled", "reference"])
@pytest.mark.parametrize("name", SCORES)
def test_changes_of_scores_and_biases(name, engine):
    query, key, value = INPUTS
    raw = query @ key.mT / 8**0.5
    score = ch.Dot().then(SCORES[name])
    want = torch.softmax(matrix(SCORES[name], raw), -1) @ value
    leaves = [t.clone().requires_grad_() for t in INPUTS]
    output = ch.attention(*leaves, score=score, engine=engine)
    torch.testing.assert_close(output, want)
    if name != "maximum":  # the rest of each rule is added to the score
        rule = lambda b, h, i, j: SCORES[name](torch.zeros(()), b, h, i, j)
        torch.testing.assert_close(ch.attention(*INPUTS, bias=ch.BiasFunction(rule), engine=engine), want)
        (got,) = torch.autograd.grad(output.sin().sum(), leaves[0])
        scores = [t.clone().requires_grad_() for t in INPUTS]
        plain = torch.softmax(scores[0] @ scores[1].mT / 8**0.5 + matrix(rule), -1) @ scores[2]
        (right,) = torch.autograd.grad(plain.sin().sum(), scores[0])
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("name", ["any", "elementwise"])
def test_the_first_call_may_be_compiled(name):
    rule = MASKS[name]
    compiled = torch.compile(lambda *x: ch.attention(*x, mask=mask), backend="aot_eager", fullgraph=True)
    mask = ch.MaskFunction(lambda *at: rule(*at))
    torch.testing.assert_close(compiled(*INPUTS), ch.attention(*INPUTS, mask=matrix(rule)))


def test_a_table_that_is_learnt():
    table = torch.nn.Parameter(PLACES.clone())
    output = ch.attention(*INPUTS, score=ch.Dot().then(lambda s, b, h, i, j: s + torch.dot(table[i], table[j])))
    (got,) = torch.autograd.grad(output.sin().sum(), table)
    plain = torch.softmax(INPUTS[0] @ INPUTS[1].mT / 8**0.5 + table @ table.T, -1) @ INPUTS[2]
    (want,) = torch.autograd.grad(plain.sin().sum(), table)
    torch.testing.assert_close(got, want)


def test_a_trial_draws_no_random_numbers_of_the_caller():
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    ch.Dot().then(lambda s, b, h, i, j: s + torch.rand_like(s).sum())
    ch.MaskFunction(lambda b, h, i, j: torch.rand_like(i.float()) > 0.5)
    assert torch.equal(torch.rand(3), want)


@pytest.mark.parametrize("join", [lambda rule: rule, lambda rule: and_masks(rule, noop_mask)])
def test_a_rule_that_is_elementwise_is_called_once_a_part(join):
    calls = []
    rule = lambda b, h, i, j: calls.append(i.shape) or (i >= j)
    mask = ch.MaskFunction(join(rule), reads=())
    calls.clear()
    ch.attention(*INPUTS, mask=mask)
    assert all(len(shape) == 4 for shape in calls)


class Rows(torch.nn.Module):
    """Attention by rules that are made in its call, and read tables that are set after it was made."""

    labels = places = None

    def forward(self, query, key, value):
        rule = lambda b, h, i, j: (self.labels[i] & self.labels[j]).any() | (i == j)
        change = lambda s, b, h, i, j: s + torch.dot(self.places[i], self.places[j])
        return ch.attention(query, key, value, mask=ch.MaskFunction(rule), score=ch.Dot().then(change))


def with_tables():
    rows = Rows()
    rows.labels, rows.places = LABELS, PLACES
    scores = INPUTS[0] @ INPUTS[1].mT / 8**0.5 + PLACES @ PLACES.T
    keep = (LABELS[:, None] & LABELS).any(-1) | torch.eye(32, dtype=torch.bool)
    return rows, torch.softmax(scores.masked_fill(~keep, -torch.inf), -1) @ INPUTS[2]


def test_rules_that_are_made_in_compiled_and_in_traced_code():
    rows, want = with_tables()
    torch.testing.assert_close(torch.compile(rows, backend="aot_eager", fullgraph=True)(*INPUTS), want)
    torch.testing.assert_close(make_fx(lambda *x: rows(*x))(*INPUTS)(*INPUTS), want)


def test_rules_whose_tables_are_set_later():
    tables, (filled, want) = Rows(), with_tables()
    mask = ch.MaskFunction(lambda b, h, i, j: (tables.labels[i] & tables.labels[j]).any() | (i == j))
    score = ch.Dot().then(lambda s, b, h, i, j: s + torch.dot(tables.places[i], tables.places[j]))
    bias = ch.BiasFunction(lambda b, h, i, j: torch.dot(tables.places[i], tables.places[j]))
    tables.labels, tables.places = filled.labels, filled.places
    torch.testing.assert_close(ch.attention(*INPUTS, mask=mask, score=score), want)
    torch.testing.assert_close(ch.attention(*INPUTS, mask=mask, bias=bias), want)


@pytest.mark.parametrize("made_before", [False, True])
def test_exported_code_reduces_over_the_last_dimension_alone(made_before):
    def of_rule(rule):
        mask = ch.MaskFunction(rule) if made_before else None
        module = torch.nn.Module()
        module.forward = lambda *x: ch.attention(*x, mask=ch.MaskFunction(rule) if mask is None else mask)
        return torch.export.export(module, tuple(INPUTS))

    rule = lambda b, h, i, j: (LABELS[i] & LABELS[j]).any(-1) | (i == j)
    want = ch.attention(*INPUTS, mask=ch.MaskFunction(rule))
    torch.testing.assert_close(of_rule(rule).module()(*INPUTS), want)
    with pytest.raises(ch.UnsupportedError, match=r"over the last dimension alone"):
        of_rule(MASKS["any"])


def test_a_result_of_one_number_may_have_dimensions():
    rule = lambda b, h, i, j: ((LABELS[i] & LABELS[j]).any() | (i == j)).view(1)
    want = ch.attention(*INPUTS, mask=ch.MaskFunction(MASKS["any"]))
    torch.testing.assert_close(ch.attention(*INPUTS, mask=ch.MaskFunction(rule)), want)
