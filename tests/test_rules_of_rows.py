"""Rules that read rows of a table, as FlexAttention's mask_mod and score_mod may: each is computed pair by pair."""

import pytest
import torch

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


def test_a_rule_without_one_number_for_a_pair_is_an_error():
    with pytest.raises(ch.ShapeError, match="does not broadcast"):
        ch.attention(*INPUTS, mask=ch.MaskFunction(lambda b, h, i, j: LABELS[i] & LABELS[j]))


def test_a_rule_that_is_elementwise_is_called_once_a_part():
    calls = []
    rule = lambda b, h, i, j: calls.append(i.shape) or (i >= j)
    mask = ch.MaskFunction(rule, reads=())
    calls.clear()
    ch.attention(*INPUTS, mask=mask)
    assert all(len(shape) == 4 for shape in calls)
