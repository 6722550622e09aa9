"""The lazy matrix: any part equals the dense one's, any reduction equals the same done on it."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead as ch

LAYOUTS = [((), ()), ((3,), (3,)), ((2, 4), (2, 2)), ((2, 2, 2), (2, 1, 1))]
MASKS = {
    "none": lambda lq, lk, batch: None,
    "causal": lambda lq, lk, batch: ch.Causal(),
    "window": lambda lq, lk, batch: ch.SlidingWindow(before=20, after=3),
    "lengths": lambda lq, lk, batch: ch.Lengths([lk * (i + 1) // (batch + 1) for i in range(batch)]),
    "dense": lambda lq, lk, batch: ch.DenseMask((torch.arange(lq)[:, None] * 7 + torch.arange(lk) * 3) % 5 < 2),
    "float": lambda lq, lk, batch: random(lq, lk, seed=5).masked_fill(random(lq, lk, seed=6) > 1, -torch.inf),
}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def case(layout, lq, lk, mask):
    lead, key_lead = layout
    query, key = random(*lead, lq, 8), random(*key_lead, lk, 8, seed=1)
    batch = 1 if not lead else lead[0] if len(lead) < 3 else lead[0] * lead[1]
    mask = MASKS[mask](lq, lk, batch)
    scores = ch.Dot()(query, key)
    if isinstance(mask, ch.extend.Mask):
        allowed = scores.masked_fill(~mask.dense(query, key, "lower_right"), -torch.inf)
    else:
        allowed = scores if mask is None else scores + mask
    truth = torch.nan_to_num(allowed.softmax(-1))
    return query, key, mask, scores, allowed, truth


@st.composite
def index(draw, shape):
    parts = []
    for size in shape:
        kind = draw(st.sampled_from(["one", "some", "all"]))
        if kind == "one":
            parts.append(draw(st.integers(-size, size - 1)))
        elif kind == "some":
            ends = st.one_of(st.none(), st.integers(-size - 1, size + 1))
            parts.append(slice(draw(ends), draw(ends), draw(st.sampled_from([None, 1, 2, 3]))))
        else:
            parts.append(slice(None))
    parts = parts[: draw(st.integers(0, len(parts)))]
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), None)
    if draw(st.booleans()):
        parts.append(...)
    return tuple(parts)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_basic_index_is_that_part(data):
    layout = data.draw(st.sampled_from(LAYOUTS))
    lq, lk = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    mask = data.draw(st.sampled_from(list(MASKS)))
    query, key, mask, scores, _, truth = case(layout, lq, lk, mask)
    engine = data.draw(st.sampled_from(["tiled", "reference"]))
    weights = ch.weights(query, key, mask=mask, align="lower_right", engine=engine)
    assert weights.shape == truth.shape
    if data.draw(st.booleans()):
        _ = weights.logsumexp()  # an index uses it once it is computed
    where = data.draw(index(truth.shape))
    torch.testing.assert_close(torch.as_tensor(weights[where]), truth[where], atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(weights.scores(where), scores[where], atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("engine", ["tiled", "reference"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("lq", "lk"), [(1, 1), (63, 63), (30, 700), (150, 150)])
def test_reductions_equal_those_of_the_dense_matrix(layout, lq, lk, mask, engine):
    query, key, mask, _, allowed, truth = case(layout, lq, lk, mask)
    weights = ch.weights(query, key, mask=mask, align="lower_right", engine=engine)
    k, rows, columns = min(5, lk), 7, 13
    entropy, (values, indices), received, most, mean, distance = weights.reduce(
        ch.reductions.Entropy(),
        ch.reductions.TopK(k),
        ch.reductions.Received(),
        ch.reductions.Pool(columns),
        ch.reductions.Pool((rows, columns), "mean"),
        ch.reductions.MeanDistance(),
    )
    close = {"atol": 1e-10, "rtol": 1e-9}
    torch.testing.assert_close(weights.dense(), truth, **close)
    torch.testing.assert_close(entropy, -torch.xlogy(truth, truth).sum(-1), **close)
    torch.testing.assert_close(received, truth.sum(-2), **close)
    torch.testing.assert_close(weights.logsumexp(), allowed.logsumexp(-1), **close)
    gap = (torch.arange(lq)[:, None] + lk - lq - torch.arange(lk)).abs()
    torch.testing.assert_close(distance, (truth * gap).sum(-1), **close)

    order = truth.sort(dim=-1, descending=True, stable=True)
    torch.testing.assert_close(values, order.values[..., :k], **close)
    torch.testing.assert_close(truth.gather(-1, indices), values, **close)
    assert torch.equal(indices[values > 0], order.indices[..., :k][values > 0])
    assert all(len(set(row)) == k for row in indices.reshape(-1, k).tolist())

    def cells(matrix, size, join):
        tall, wide = -(-lq // size[0]), -(-lk // size[1])
        blocks = [
            [join(matrix[..., i : i + tall, j : j + wide]) for j in range(0, lk, wide)] for i in range(0, lq, tall)
        ]
        return torch.stack([torch.stack(row, -1) for row in blocks], -2)

    torch.testing.assert_close(most, cells(truth, (columns, columns), lambda b: b.amax((-2, -1))), **close)
    torch.testing.assert_close(mean, cells(truth, (rows, columns), lambda b: b.mean((-2, -1))), **close)
    for single, joint in ((weights.entropy(), entropy), (weights.received(), received), (weights.pool(columns), most)):
        assert torch.equal(single, joint)


def test_equal_weights_are_listed_in_the_order_of_the_keys():
    weights = ch.weights(torch.zeros(3, 4), torch.zeros(900, 4))
    assert weights.topk(6)[1].tolist() == [list(range(6))] * 3
    key = torch.zeros(900, 1)
    key[[700, 300, 301]] = 1.0
    assert ch.weights(torch.ones(1, 1), key).topk(5)[1].tolist() == [[300, 301, 700, 0, 1]]


def test_weights_times_value_is_attention():
    query, key, mask, _, _, truth = case(((2, 4), (2, 2)), 20, 30, "causal")
    value = random(2, 2, 30, 3, seed=9)
    product = ch.weights(query, key, mask=mask, align="lower_right") @ value
    torch.testing.assert_close(product, truth @ value.repeat_interleave(2, 1))


def test_parts_are_differentiable():
    query, key, *_ = case(((2,), (2,)), 9, 9, "causal")
    query.requires_grad_()
    weights = ch.weights(query, key, mask=ch.Causal())
    scores = ch.Dot()(query, key).masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -torch.inf)
    for where in ((0, 3), (1, slice(2, 5), slice(1, 4)), ...):
        want = torch.autograd.grad(scores.softmax(-1)[where].square().sum(), query, retain_graph=True)[0]
        got = torch.autograd.grad(weights[where].square().sum(), query)[0]
        torch.testing.assert_close(got, want)
    assert weights.entropy().requires_grad and weights.dense().requires_grad
    with torch.no_grad():
        assert not weights.entropy().requires_grad and not weights.logsumexp().requires_grad


def test_low_precision_inputs_have_float32_weights():
    x = random(2, 40, 8).bfloat16()
    weights = ch.weights(x, x)
    assert weights.dtype == torch.float32 and weights[0].dtype == torch.float32
    torch.testing.assert_close(weights.dense(), (x.float() @ x.float().transpose(-1, -2) / 8**0.5).softmax(-1))


def test_repr_says_what_it_is():
    x = torch.zeros(2, 5, 4)
    text = repr(ch.weights(x, x, mask=ch.Causal()))
    assert text.startswith("Weights((2, 5, 5), torch.float32, engine='native', mask=Causal()")
    assert len(ch.weights(x, x)) == 2


def test_copies_and_settings_of_a_live_matrix():
    query, key, value = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5, 2)
    score = ch.Cosine(1.0)
    weights = ch.weights(query, key, score=score)
    before = weights.dense()
    masked = ch.weights(query, key, score=score, mask=torch.rand(3, 5) > 0.5)
    for one in (weights, masked):
        one.dense()
        for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert torch.equal(other.dense(), one.dense())
    score.temperature = 0.1
    torch.testing.assert_close(weights.dense() @ value, weights @ value)
    assert not torch.equal(weights.dense(), before)
    score.softcap = 0.5
    torch.testing.assert_close(weights.dense(), ch.weights(query, key, score=score).dense())


def test_a_value_may_have_more_leading_dimensions_than_a_live_matrix():
    query, key, value = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4), torch.randn(6, 2, 5, 3)
    torch.testing.assert_close(ch.weights(query, key) @ value, ch.attention(query, key, value))
