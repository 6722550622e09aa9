"""Regressions: cases whose results were wrong once."""

import itertools
import sys

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.masks.base import Spans
from clearhead.scores.base import Pairwise
from clearhead.testing import check_bias, check_mask, check_score

Q, K, V = (torch.randn(1, 2, 6, w, generator=torch.Generator().manual_seed(i)) for i, w in enumerate((8, 8, 3)))


def test_a_window_without_limit_does_not_overflow():
    want = ch.attention(Q, K, V)
    for size in (sys.maxsize, 2**70):
        torch.testing.assert_close(ch.attention(Q, K, V, mask=ch.SlidingWindow(before=size, after=size)), want)
    for far in (torch.tensor([2**63 - 1]), 2**80):
        torch.testing.assert_close(ch.attention(Q, K, V, mask=ch.Causal(), align=far), want)


@pytest.mark.parametrize("engine", ["tiled", "sdpa"])
@pytest.mark.parametrize("change", ["mask", "key"])
def test_a_change_between_forward_and_backward_is_an_error_and_no_wrong_gradient(engine, change):
    query = torch.randn(1, 1, 3000, 8, requires_grad=True)
    key, keep = torch.randn(1, 1, 3000, 8), torch.rand(3000, 3000) < 0.5
    value = key.clone()
    output, again = (ch.attention(query, key, value, mask=keep, engine=engine) for _ in range(2))
    (want,) = torch.autograd.grad(again.square().sum(), query)
    keep.logical_not_() if change == "mask" else key.neg_()
    try:
        (got,) = torch.autograd.grad(output.square().sum(), query)
    except (ch.ClearheadError, RuntimeError) as error:
        assert "modified" in str(error)
    else:
        assert change == "key"  # the engine may have made a copy of its own
        torch.testing.assert_close(got, want)


def test_a_float_mask_of_the_least_number_is_uniform_everywhere():
    mask = torch.full((6, 6), torch.finfo(torch.float32).min)
    weights = ch.weights(Q, K, mask=mask)
    even = torch.full((1, 2, 6, 6), 1 / 6)
    torch.testing.assert_close(weights.dense(), even)
    torch.testing.assert_close(weights[0, 0, 0, :3], even[0, 0, 0, :3])
    torch.testing.assert_close(weights.entropy(), torch.full((1, 2, 6), np.log(6.0)).float())
    torch.testing.assert_close(weights.topk(6)[0], even)
    query, key = Q.clone().requires_grad_(), K.clone()
    gradients = [
        torch.autograd.grad(ch.attention(query, key, V, mask=mask, engine=engine).sum(), query)[0]
        for engine in (None, "tiled", "reference")
    ]
    torch.testing.assert_close(gradients[0], gradients[2])
    torch.testing.assert_close(gradients[1], gradients[2])


def test_a_function_that_closes_over_a_parameter():
    parameter = torch.nn.Parameter(torch.tensor(0.7))
    weights = ch.weights(Q, K, score=lambda q, k: parameter * (q @ k.mT))
    weights[..., 1:3].square().sum().backward()
    assert parameter.grad is not None and weights.dense().requires_grad


@pytest.mark.parametrize("engine", ["tiled", "reference"])
def test_a_tile_that_belongs_to_the_caller_is_not_written_to(engine):
    table = torch.randn(1, 2, 6, 6)
    table[0, 0, 0, 2] = -torch.inf
    before = table.clone()
    weights = ch.weights(Q, K, score=lambda q, k: table, engine=engine)
    weights.reduce(ch.reductions.Entropy(), ch.reductions.TopK(3), ch.reductions.Pool(2))
    assert torch.equal(table, before)
    keys_alone = ch.weights(Q, K, score=lambda q, k: k[..., 0].unsqueeze(-2).expand(*q.shape[:-1], -1), engine=engine)
    assert keys_alone.topk(2)[0].shape == (1, 2, 6, 2)


def test_a_score_of_minus_infinity_is_a_pair_that_is_not_seen():
    nothing = lambda q, k: q @ k.mT - torch.inf
    for engine in ("tiled", "reference"):
        assert (ch.attention(Q, K, V, score=nothing, engine=engine) == 0).all()
    some = lambda q, k: (q @ k.mT).masked_fill((k[..., 0] > 0).unsqueeze(-2), -torch.inf)
    weights = ch.weights(Q, K, score=some)
    assert weights.entropy().isfinite().all()
    assert all(len(set(row)) == 6 for row in weights.topk(6)[1].reshape(-1, 6).tolist())


@pytest.mark.parametrize("engine", ["reference", "tiled"])
def test_half_precision_scores_do_not_overflow(engine):
    x = torch.full((1, 1, 2, 64), 40.0).half()
    assert ch.attention(x, x, x[..., :1], engine=engine).flatten().tolist() == [40, 40]
    gaussian = ch.Gaussian(8.0)
    assert ch.attention(x * 0, x, x[..., :1], score=gaussian, engine=engine).flatten().tolist() == [40, 40]
    assert ch.Dot()(x, x)[0, 0, 0, 0] == 12800


@pytest.mark.parametrize("engine", ["reference", "tiled", "sdpa"])
@pytest.mark.parametrize("keep", [[1, 1, 1, 1, 0, 1], [1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]], ids=str)
def test_padding_near_the_largest_number_contributes_nothing(engine, keep):
    mask = ch.Padding(torch.tensor([keep]))
    pad = keep.index(0)
    results = []
    for filling in (0.0, 3e38):
        query, key, value = (t.clone() for t in (Q, K, V))
        key[:, :, pad], value[:, :, pad] = filling, filling
        query.requires_grad_()
        output = ch.attention(query, key, value, mask=mask, engine=engine)
        results.append((output, *torch.autograd.grad((2 * output).sum(), query)))
    for clean, dirty in zip(*results, strict=True):
        torch.testing.assert_close(dirty, clean)


def test_a_subclass_of_a_mask_has_spans_of_its_own():
    class Strict(ch.Causal):
        def lower(self, sizes):
            spans = super().lower(sizes)
            return Spans(spans.start, (spans.stop - 1).clamp(min=0))

    ch.attention(Q, K, V, mask=ch.Causal())
    assert (ch.attention(Q, K, V, mask=Strict())[:, :, 0] == 0).all()


def test_empty_parts_and_zero_heads():
    for score in (ch.Gaussian(), lambda q, k: q @ k.mT):
        assert ch.weights(Q, K, score=score)[:, 2:].shape == (1, 0, 6, 6)
    none = torch.zeros(2, 0, 5, 8)
    for engine in ("sdpa", "tiled", "reference"):
        assert ch.attention(none, none, none, engine=engine).shape == none.shape
    assert ch.weights(none, none).shape == (2, 0, 5, 5)


def test_weights_iterate_and_become_arrays():
    weights = ch.weights(torch.randn(3, 4), torch.randn(5, 4))
    assert [row.shape for row in weights] == [(5,)] * 3
    np.testing.assert_allclose(np.asarray(weights), weights.dense())


def test_weights_follow_their_inputs_and_serve_many_backwards():
    score = ch.Bilinear(8, 8)
    weights = ch.weights(Q, K, score=score)
    weights[0, 0, 0].sum().backward()
    weights[0, 0, 1].sum().backward()
    query = Q.clone()
    lazy = ch.weights(query, K)
    _ = lazy.logsumexp()
    query.mul_(2)
    torch.testing.assert_close(lazy[..., 2:4], ch.weights(query, K).dense()[..., 2:4])


def test_large_scores_keep_their_digits():
    query, key = Q * 300, K * 300
    wide = ch.weights(query.double(), key.double())
    weights = ch.weights(query, key)
    for got, want in (
        (weights[..., 2:5], weights[...][..., 2:5]),
        (weights.entropy(), wide.entropy().float()),
        (weights.pool(6), weights.dense()),
    ):
        torch.testing.assert_close(got, want, atol=2e-2 if got is weights else 2e-3, rtol=1e-5)
    torch.testing.assert_close(weights[..., 2:5], weights.dense()[..., 2:5], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("engine", [None, "tiled", "reference"])
def test_a_wide_bias_on_narrow_inputs(engine):
    """What a recorded call of a bfloat16 model with a position bias is."""
    query, key, value = (t.bfloat16() for t in (Q, K, V))
    bias = torch.randn(1, 2, 6, 6)
    weights = ch.weights(query, key, bias=bias)
    want = torch.softmax(query.float() @ key.float().mT / 8**0.5 + bias, -1)
    torch.testing.assert_close(weights.dense(), want)
    torch.testing.assert_close((weights @ value).float(), want @ value.float(), atol=2e-2, rtol=2e-2)
    mask = bias.bfloat16()
    got = ch.attention(query, key, value, mask=mask, engine=engine)
    torch.testing.assert_close(got.float(), want @ value.float(), atol=2e-2, rtol=2e-2)


class Weighted(ch.extend.Score):
    """A dot product with a learnt weight for each dimension, lowered with it."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.linspace(0.5, 2.0, 4))

    def tile(self, query, key):
        return (query * self.w) @ key.mT

    def lower(self, query, key):
        return Pairwise("mul", query, key, weight=self.w)


def test_every_engine_takes_the_weight_of_a_lowered_score():
    check_score(Weighted)


def test_a_gradient_that_is_missing_is_named():
    class Forgets(Weighted):
        def lower(self, query, key):
            return Pairwise("mul", query * self.w.detach(), key)

    with pytest.raises(AssertionError, match="no gradient to the score's parameter w"):
        check_score(Forgets)
    for given in (3, int):
        with pytest.raises(AssertionError, match=r"an object or a function|a Score or a function"):
            check_score(given)


COUNTER = itertools.count(1)
REPEATED = {
    "a score": (check_score, lambda q, k: q @ k.mT, lambda q, k: q @ k.mT * torch.rand(())),
    "a counter": (check_score, ch.Cosine(), lambda q, k: q @ k.mT * next(COUNTER)),
    "a change": (
        check_score,
        ch.Dot().then(lambda s, b, h, i, j: s / (1 + (i - j).abs())),
        ch.Dot().then(lambda s, b, h, i, j: s * float(np.random.rand())),
    ),
    "a bias": (check_bias, ch.ALiBi(2), lambda b, h, i, j: (i - j) * torch.rand(i.shape)),
    "a mask": (check_mask, lambda b, h, i, j: i >= j, lambda b, h, i, j: i - j < next(COUNTER) % 2 * 9),
}


@pytest.mark.parametrize("name", REPEATED)
def test_a_function_that_gives_other_numbers_when_it_is_called_again(name):
    check, right, wrong = REPEATED[name]
    check(right)
    with pytest.raises(AssertionError, match="the second call with the same arguments gave other numbers"):
        check(wrong)


def test_plan_says_what_was_asked_for():
    assert ch.plan(Q, K, V, engine="tiled").declined["sdpa"] == ["eligible; the call names tiled"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [-1.0, 0.0])
def test_scales_that_are_not_positive(dtype, scale):
    """PyTorch's kernel gives NaN there in low precision: it masks first and scales then."""
    x = torch.randn(2, 3, 40, 4, generator=torch.Generator().manual_seed(0))
    for mask in (ch.Causal(), ch.SlidingWindow(before=5), ch.Lengths([0, 20])):
        got = ch.attention(*[x.to(dtype)] * 3, score=ch.Dot(scale), mask=mask, engine="sdpa")
        want = ch.attention(*[x.to(dtype).double()] * 3, score=ch.Dot(scale), mask=mask, engine="reference")
        assert (got.double() - want).abs().max() < 0.05


def test_float_masks_that_say_something():
    """Of 0 and 1 alone is an error; all else is added, as ever."""
    added = torch.zeros(6, 6)
    for mask in (added, added.masked_fill(added == 0, 0.5), torch.ones(6, 6).tril().requires_grad_()):
        want = ch.attention(Q, K, V, bias=mask)
        torch.testing.assert_close(ch.attention(Q, K, V, mask=mask), want)
    ones = torch.ones(6, 6).tril()
    theirs = torch.nn.functional.scaled_dot_product_attention(Q, K, V, ones)
    torch.testing.assert_close(ch.scaled_dot_product_attention(Q, K, V, ones), theirs)  # torch's own meaning


@pytest.mark.parametrize("engine", [None, "tiled", "reference"])
def test_a_bandwidth_is_learnt(engine):
    width = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    score, x = ch.Gaussian(width), torch.rand(7, 3, dtype=torch.float64)
    assert [*score.parameters()] == [width] and "learnt" in repr(score)
    leave_one_out = ~ch.DenseMask(torch.eye(7, dtype=torch.bool))

    def run(h):
        with torch.no_grad():
            width.fill_(h)
        return ch.attention(x, x, x, score=score, mask=leave_one_out, engine=engine)

    (got,) = torch.autograd.grad(run(2.0).square().sum(), width)
    near = [run(2.0 + step).square().sum() for step in (1e-5, -1e-5)]
    torch.testing.assert_close(got, (near[0] - near[1]).detach() / 2e-5, rtol=1e-5, atol=1e-8)


def test_lengths_of_rows_and_bool_masks_in_masked_softmax():
    scores = torch.rand(2, 3)
    want = torch.stack([ch.masked_softmax(row, n) for row, n in zip(scores, (1, 3), strict=True)])
    torch.testing.assert_close(ch.masked_softmax(scores, [1, 3]), want)
    keep = torch.arange(3) < torch.tensor([1, 3])[:, None]
    torch.testing.assert_close(ch.masked_softmax(scores, keep), want)
    causal = ch.masked_softmax(torch.zeros(2, 3), ch.Causal(), align="lower_right")
    torch.testing.assert_close(causal, torch.tensor([[0.5, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3]]))


def test_masked_softmax_along_another_dimension():
    scores, keep = torch.rand(3, 3), torch.rand(3, 3) > 0.4
    torch.testing.assert_close(ch.masked_softmax(scores, keep, dim=0), ch.masked_softmax(scores.T, keep.T).T)
    wide = torch.rand(2, 3, 5)
    column = torch.arange(3)[:, None] < 2  # broadcasts to the scores as they are given
    got = ch.masked_softmax(wide, column, dim=1)
    torch.testing.assert_close(got, ch.masked_softmax(wide.transpose(1, 2), column.expand(3, 5).T).transpose(1, 2))
    with pytest.raises(ch.ShapeError, match="does not broadcast"):
        ch.masked_softmax(scores, torch.ones(4, 3).bool())
    with pytest.raises(ch.ClearheadError, match="align is 'left'"):
        ch.masked_softmax(scores, align="left")
