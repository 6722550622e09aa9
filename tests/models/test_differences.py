"""Two recordings compared: held to dense weights in NumPy; what does not fit is an error."""

import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from head_oracle import divergence

import clearhead as ch
from clearhead.models.comparison.differences import jensen_shannon

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")

from small_models import IDS, MODELS, OWN_EAGER, PADDINGS, flat, pair, perturbed  # noqa: E402


def watched(model, ids, mask=None):
    given = {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask})
    with torch.no_grad(), ch.watch(model) as seen:
        model(**given)
    return seen


def eager(model, ids, mask=None):
    given = {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask})
    with torch.no_grad():
        return [dense.double().numpy() for dense in flat(model(**given, output_attentions=True))]


@pytest.mark.parametrize("padded", PADDINGS)
@pytest.mark.parametrize("name", ["Bert", "Llama", "Mistral", "GptOss"])
def test_two_checkpoints_differ_as_their_eager_weights(name, padded):
    mask = PADDINGS[padded]
    fast, slow = pair(name, (MODELS | OWN_EAGER)[name])
    fast = slow if name in OWN_EAGER else fast
    before, after = watched(fast, IDS, mask), watched(perturbed(fast, 0.1), IDS, mask)
    found = before.compare(after)
    words = np.ones(IDS.shape, bool) if mask is None else mask.numpy().astype(bool)
    for call, p, q in zip(found.calls, eager(slow, IDS, mask), eager(perturbed(slow, 0.1), IDS, mask), strict=True):
        for head in range(4):
            rows = [divergence(p[b, head, i], q[b, head, i]) for b, i in zip(*words.nonzero(), strict=True)]
            assert float(call.divergence[head]) == pytest.approx(np.mean(rows), abs=2e-6) and np.mean(rows) > 1e-3
            for b, i in zip(*words.nonzero(), strict=True):
                difference = call.weights[int(b), head, int(i)].double().numpy()
                np.testing.assert_allclose(difference, q[b, head, i] - p[b, head, i], atol=2e-6)
        assert call.by_query.isnan().any() == (not words.all())
    number, head = found.most
    divergences = np.array([[row["divergence"] for row in found.table()]]).reshape(-1, 4)
    assert divergences[number, head] == divergences.max()
    assert str(found).startswith(f"L{number}H{head} differs most: a Jensen–Shannon divergence of ")


class Block(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x.roll(1, -1), x, **self.options)


def seen_of(x, **options):
    with ch.watch(block := Block(**options)) as seen:
        block(x)
    return seen


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense_of(x):
    length = x.shape[2]
    scores = x @ x.roll(1, -1).mT / x.shape[-1] ** 0.5
    return scores.masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf).softmax(-1).numpy()


def test_in_float64_it_is_exact_and_symmetric():
    x, y = random(2, 3, 50, 8), random(2, 3, 50, 8, seed=1)
    one, other = seen_of(x, is_causal=True), seen_of(y, is_causal=True)
    found, back = one.compare(other)[0], other.compare(one)[0]
    p, q = dense_of(x), dense_of(y)
    want = [[[divergence(p[b, h, i], q[b, h, i]) for i in range(50)] for h in range(3)] for b in range(2)]
    np.testing.assert_allclose(found.by_query.numpy(), want, atol=1e-13)
    torch.testing.assert_close(found.by_query, back.by_query, rtol=1e-12, atol=1e-16)
    torch.testing.assert_close(found.weights[...], -back.weights[...], rtol=0, atol=0)
    assert (one.compare(one)[0].divergence == 0).all()
    np.testing.assert_allclose(found.weights[1, :, 3:20:4, ::2].numpy(), (q - p)[1, :, 3:20:4, ::2], atol=1e-13)
    rows = torch.cat([block for _, block in found.weights.blocks(1, 2)])
    np.testing.assert_allclose(rows.numpy(), (q - p)[1, 2], atol=1e-13)
    assert repr(found) == "CallDifference('Block', self, (2, 3, 50, 50))"
    assert repr(found.weights).startswith("WeightDifference((2, 3, 50, 50), torch.float64, ")


def test_nearly_equal_weights_keep_their_digits():
    """JS is about Σ (p − q)² / 8m there: entropies, which cancel, would have no digit of it."""
    x = random(1, 1, 30, 8)
    y = x + 1e-7 * random(1, 1, 30, 8, seed=1)
    p, q = dense_of(x)[0, 0], dense_of(y)[0, 0]
    want = ((p - q) ** 2 / np.where(p + q > 0, 4 * (p + q), 1)).sum(-1)
    got = seen_of(x, is_causal=True).compare(seen_of(y, is_causal=True))[0].by_query[0, 0]
    np.testing.assert_allclose(got[1:], want[1:], rtol=1e-4)
    assert 0 < want[5] < 1e-13


def test_weights_far_below_the_others_keep_their_digits():
    """p/(p + q) is 1e-30 and less there, and (p − q)/(p + q) rounds to −1, whose logarithm is none."""
    x, y = 12 * random(1, 1, 30, 8), 12 * random(1, 1, 30, 8, seed=1)
    p, q = dense_of(x)[0, 0], dense_of(y)[0, 0]
    want = [divergence(p[i], q[i]) for i in range(30)]
    found = seen_of(x, is_causal=True).compare(seen_of(y, is_causal=True))[0]
    np.testing.assert_allclose(found.by_query[0, 0], want, atol=1e-13)
    assert p[p > 0].min() < 1e-30 and max(want) > 0.69


@pytest.mark.parametrize("apart", [1e-3, 0.1, 3.0, 30.0])
def test_of_float32_weights_it_has_the_digits_of_float64(apart):
    """Of the same weights; where they are far apart some are 0 in one of the two, and some in both."""
    scores = random(40, 300)
    p, q = ((scores + apart * random(40, 300, seed=seed)).softmax(-1).float() for seed in (1, 2))
    p[:, :3] = q[:, 2:5] = 0
    middle = (p.double() + q.double()) / 2
    want = [torch.special.xlogy(t, t).sub(torch.special.xlogy(t, middle)).sum(-1) / 2 for t in (p.double(), q.double())]
    got = jensen_shannon(p, q, rest=False)
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got, sum(want), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("other", ["the same form", "a matrix"])
def test_a_window_is_compared_over_the_keys_that_it_sees(other):
    """Each block of rows has keys of its own; in float32, one mask of intervals and one of a matrix fit."""
    length, reach = 1500, 40
    far = torch.arange(length)[:, None] - torch.arange(length)
    keep = (far >= 0) & (far <= reach)
    keep[700] = False

    class AsMatrix(Block):
        def forward(self, x):
            return ch.attention(x, x.roll(1, -1), x, mask=keep)

    x, y = random(1, 2, length, 4).float(), random(1, 2, length, 4, seed=1).float()
    with ch.watch(matrix := AsMatrix()) as seen:
        matrix(y)
    after = seen_of(y, attn_mask=keep) if other == "the same form" else seen
    found = seen_of(x, attn_mask=keep).compare(after)[0].by_query
    p, q = (
        torch.nan_to_num((t @ t.roll(1, -1).mT / 2).double().masked_fill(~keep, -torch.inf).softmax(-1)) for t in (x, y)
    )
    want = [[divergence(p[0, h, i].numpy(), q[0, h, i].numpy()) for i in range(0, length, 7)] for h in range(2)]
    assert found[:, :, 700].isnan().all() and int(found.isnan().sum()) == 2
    got = found[0, :, ::7].nan_to_num(0.0)
    np.testing.assert_allclose(got, np.where(np.arange(0, length, 7) == 700, 0, want), atol=2e-6)


def test_blocks_of_a_long_head_are_its_rows():
    x, y = random(1, 1, 2500, 4).float(), random(1, 1, 2500, 4, seed=1).float()
    found = seen_of(x, is_causal=True).compare(seen_of(y, is_causal=True))[0]
    blocks = list(found.weights.blocks(0, 0))
    assert len(blocks) == 6 and [rows.stop for rows, _ in blocks][-1] == 2500
    assert all(block.shape == (rows.stop - rows.start, 2500) for rows, block in blocks)
    np.testing.assert_allclose(torch.cat([block for _, block in blocks]), (dense_of(y) - dense_of(x))[0, 0], atol=1e-6)


def test_texts_of_other_lengths_at_the_positions_that_correspond():
    x, y = random(1, 2, 12, 8), random(1, 2, 10, 8, seed=1)
    mine, theirs = [0, 1, 4, 5, 6, 11], [0, 2, 3, 5, 6, 9]
    one, other = seen_of(x, is_causal=True), seen_of(y, is_causal=True)
    found = one.compare(other, matched=(mine, theirs))[0]
    p = dense_of(x)[:, :, mine][..., mine]
    q = dense_of(y)[:, :, theirs][..., theirs]
    want = [[divergence(p[0, h, i], q[0, h, i]) for i in range(6)] for h in range(2)]
    np.testing.assert_allclose(found.by_query[0].numpy(), want, atol=1e-13)
    assert found.weights.shape == (1, 2, 6, 6)
    np.testing.assert_allclose(found.weights[...].numpy(), q - p, atol=1e-13)
    np.testing.assert_allclose(found.weights[0, 1, 2:5, 1::2].numpy(), (q - p)[0, 1, 2:5, 1::2], atol=1e-13)
    assert found.weights[0, 1, 2:2].shape == (0, 6)


def test_a_query_that_sees_nothing_is_left_out():
    keep = torch.ones(6, 6).bool()
    keep[2] = False
    x, y = random(1, 2, 6, 4), random(1, 2, 6, 4, seed=1)
    found = seen_of(x, attn_mask=keep).compare(seen_of(y, attn_mask=keep))[0]
    assert found.by_query[:, :, 2].isnan().all() and int(found.by_query.isnan().sum()) == 2
    assert found.divergence.isfinite().all()


HALF = torch.ones(6, 6).bool().tril(-1) | torch.eye(6).bool()
X = random(1, 2, 6, 4)
BAD = {
    "heads": (lambda: seen_of(X).compare(seen_of(random(1, 3, 6, 4))), ch.ShapeError, "other heads or sequences"),
    "batch": (lambda: seen_of(X).compare(seen_of(random(2, 2, 6, 4))), ch.ShapeError, "other heads or sequences"),
    "words": (lambda: seen_of(X).compare(seen_of(X), matched=("ab", "cd")), ch.ClearheadError, "two lists"),
    "not ascending": (lambda: seen_of(X).compare(seen_of(X), matched=([1, 0], [0, 1])), ch.ClearheadError, "ascending"),
    "unequal": (lambda: seen_of(X).compare(seen_of(X), matched=([0], [0, 1])), ch.ClearheadError, "as many"),
    "beyond": (lambda: seen_of(X).compare(seen_of(X), matched=([6], [0])), ch.ShapeError, "holds 6, and there are 6"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_does_not_fit_is_an_error(bad):
    make, error, said = BAD[bad]
    with pytest.raises(error, match=said):
        make()


def test_equal_masks_of_other_forms_fit():
    found = seen_of(X, is_causal=True).compare(seen_of(X, attn_mask=HALF))
    assert (found[0].divergence < 1e-15).all()
