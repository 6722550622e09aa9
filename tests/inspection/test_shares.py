"""Weights on some keys of each query, found without the others: held to dense weights in NumPy, in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead as ch
from clearhead.inspection.measures import Subject
from clearhead.inspection.measures.allowed import grouped, one_key
from clearhead.inspection.measures.base import Pairs
from clearhead.problem.problem import make_problem
from clearhead.problem.words import Words

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 3e-6, torch.bfloat16: 3e-6}


class Holes(ch.extend.Mask):
    """All keys before the query but two gaps."""

    def lower(self, sizes):
        rows = torch.arange(sizes.queries).view(1, 1, -1)
        low = torch.stack([rows // 4, rows // 2], -1)
        high = torch.stack([rows // 3, rows // 2 + 5], -1)
        return ch.extend.Spans(rows * 0, (rows + 1).clamp(max=sizes.keys), gaps=(low, high))

    def keep(self, queries, keys):
        i, j = np.arange(queries)[:, None], np.arange(keys)
        return (j <= i) & ~((j >= i // 4) & (j < i // 3)) & ~((j >= i // 2) & (j < i // 2 + 5))


def far(queries, keys):
    return np.arange(queries)[:, None] - np.arange(keys)


def every(queries, keys):
    return np.ones((queries, keys), bool)


RANDOM = torch.rand(2, 4, 70, 70, generator=torch.Generator().manual_seed(3)) > 0.6
MASKS = {  # the mask, its rule, and whether it is intervals
    "none": (None, every, True),
    "causal": (ch.Causal(), lambda q, k: far(q, k) >= 0, True),
    "window": (ch.SlidingWindow(before=9), lambda q, k: (far(q, k) >= 0) & (far(q, k) <= 9), True),
    "prefix": (ch.PrefixLM(20), lambda q, k: (far(q, k) >= 0) | (np.arange(k) < 20), True),
    "padding": (
        ch.Lengths([70, 31]) & ch.Causal(),
        lambda q, k: np.stack([far(q, k) >= 0, (far(q, k) >= 0) & (np.arange(k) < 31)])[:, None],
        True,
    ),
    "holes": (Holes(), Holes().keep, True),
    "a matrix": (ch.DenseMask(RANDOM), lambda q, k: RANDOM.numpy(), False),
}
TOKENS = {
    "some": torch.randint(0, 6, (2, 70), generator=torch.Generator().manual_seed(1)),
    "one text": torch.randint(0, 30, (1, 70), generator=torch.Generator().manual_seed(2)),
    "all equal": torch.full((2, 70), 7),
    "all different": torch.arange(70)[None],
}


def operands(dtype, key_heads=2, length=70):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, length, 8), (2, key_heads, length, 8), (2, key_heads, length, 5))
    return [(2 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype) for shape in shapes]


def dense(query, key, keep, bias=0.0):
    """The weights of the keys, (B, H, Lq, Lk), 0 where nothing is allowed."""
    q, k = (t.double().numpy() for t in (query, key))
    k = k.repeat(q.shape[1] // k.shape[1], 1)
    scores = np.where(keep, q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5 + bias, -np.inf)
    top = scores.max(-1, keepdims=True)
    above = np.exp(scores - np.where(np.isfinite(top), top, 0))
    return above / np.maximum(above.sum(-1, keepdims=True), 1e-300)


def even(keep, shape):
    keep = np.broadcast_to(keep, shape)
    return keep / np.maximum(keep.sum(-1, keepdims=True), 1)


def meant(tokens, earlier):
    """Which pairs each measure means: the same word elsewhere, and what came after it before."""
    ids, length = tokens.numpy(), tokens.shape[1]
    same = (ids[:, :, None] == ids[:, None]) & (far(length, length) != 0)
    after = np.zeros_like(same)
    after[:, :, 1:] = ids[:, :, None] == ids[:, None, :-1]
    return (after & (far(length, length) > 0) if earlier else same)[:, None]


def found(subject, earlier):
    asked, held = subject.tokens
    before = torch.nn.functional.pad(held[:, :-1], (1, 0), value=-1)
    pairs = Pairs(asked, before if earlier else held, subject.earlier if earlier else subject.elsewhere)
    return pairs, grouped(subject.problem, pairs)


def norms_of(value):
    """Lengths of vectors, those of the values and others, for each query head."""
    own = value.to(torch.promote_types(value.dtype, torch.float32)).norm(dim=-1).repeat_interleave(2, 1)
    return {"value": own, "transformed": own.square()}


def hold(got, want, dtype):
    assert got.shape[0] == want.shape[0] and got.shape[2:] == want.shape[2:]
    np.testing.assert_allclose(got.double().numpy(), np.broadcast_to(want, got.shape), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("mask", MASKS)
def test_pairs_with_equal_tokens(mask, tokens, dtype):
    given, rule, intervals = MASKS[mask]
    query, key, value = operands(dtype)
    subject = Subject(make_problem(query, key, mask=given), True, tokens=(None, TOKENS[tokens]), norms=norms_of(value))
    keep = rule(70, 70)
    own, uniform = dense(query, key, keep), even(keep, (2, 4, 70, 70))
    for earlier in (False, True):
        pairs, groups = found(subject, earlier)
        assert (groups is not None) == intervals
        want = meant(TOKENS[tokens], earlier)
        hold(subject.own.on_pairs(pairs, groups), (own * want).sum(-1), dtype)
        got = subject.uniform.on_pairs(pairs, groups)
        heads = got.shape[1]
        hold(got, (uniform * want).sum(-1)[:, :heads], dtype)
        hold(subject.own.on_pairs(pairs, None), (own * want).sum(-1), dtype)  # the look at all pairs
    norms = np.linalg.norm(value.double().numpy(), axis=-1).repeat(2, 1)
    for name, lengths in (("value", norms), ("transformed", norms**2)):
        for moved, weights in ((subject.moved(name), own), (subject.uniform.moved(name), uniform)):
            np.testing.assert_allclose(moved.double(), (weights * lengths[:, :, None]).sum(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shift", [-1, 0, 3])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_one_key_a_query(mask, biased, shift):
    given, rule, _ = MASKS[mask]
    query, key, _ = operands(torch.float32)
    bias = torch.randn(1, 4, 70, 70, generator=torch.Generator().manual_seed(5)) if biased else None
    if biased:
        bias[..., 5, :], bias[..., ::3, 2] = -torch.inf, -torch.inf  # a row of nothing, and pairs
    subject = Subject(make_problem(query, key, mask=given, bias=bias), True)
    keep = rule(70, 70) & (True if bias is None else np.isfinite(bias.numpy()))
    added = 0.0 if bias is None else np.where(np.isfinite(bias.numpy()), bias.numpy(), 0.0)
    keys = torch.arange(70)[None] + shift
    keys = keys.masked_fill((keys < 0) | (keys >= 70), -1)
    some = one_key(subject.problem, keys)
    at = np.eye(70, k=shift, dtype=bool)
    hold(subject.own.on(some), (dense(query, key, keep, added) * at).sum(-1), torch.float32)
    got = subject.uniform.on(some)
    hold(got, (even(keep, (2, 4, 70, 70)) * at).sum(-1)[:, : got.shape[1]], torch.float32)


def test_keys_of_their_own_for_each_sequence():
    query, key, _ = operands(torch.float64)
    keys = torch.stack([torch.arange(70), torch.arange(70).flip(0)])
    for mask in ("holes", "a matrix"):
        given, rule, _ = MASKS[mask]
        subject = Subject(make_problem(query, key, mask=given), True)
        want = dense(query, key, rule(70, 70)) * (keys.numpy()[:, None, :, None] == np.arange(70))
        hold(subject.own.on(one_key(subject.problem, keys)), want.sum(-1), torch.float64)


def test_a_bias_depends_on_places_and_all_pairs_are_looked_at():
    query, key, _ = operands(torch.float64)
    problem = make_problem(query, key, mask=ch.Causal(), bias=ch.ALiBi(4))
    subject = Subject(problem, True, tokens=(None, TOKENS["some"]))
    bias = problem.bias.tile(*(slice(None),) * 4, problem.sizes).double().numpy()
    want = dense(query, key, far(70, 70) >= 0, bias) * meant(TOKENS["some"], False)
    hold(subject.own.on_pairs(*found(subject, False)), want.sum(-1), torch.float32)


def test_two_texts_of_cross_attention():
    query, key, _ = operands(torch.float64)
    ids = TOKENS["some"]
    subject = Subject(make_problem(query[:, :, :40], key), False, tokens=(ids[:, 5:45], ids))
    pairs = Pairs(*subject.tokens)
    want = dense(query[:, :, :40], key, every(40, 70)) * (ids[:, 5:45, None] == ids[:, None]).numpy()[:, None]
    for groups in (grouped(subject.problem, pairs), None):
        hold(subject.own.on_pairs(pairs, groups), want.sum(-1), torch.float64)


def test_sinks_take_their_share_of_what_is_moved_alone():
    query, key, value = operands(torch.float64)
    sinks = torch.tensor([0.5, -2.0, 30.0, -torch.inf], dtype=torch.float64)
    lengths = ch.Lengths([70, 0])  # the second sequence sees nothing
    subject = Subject(
        make_problem(query, key, mask=lengths, sinks=sinks),
        True,
        Words(),
        None,
        (None, TOKENS["some"]),
        norms_of(value),
    )
    keep = np.stack([every(70, 70), ~every(70, 70)])[:, None]
    own = dense(query, key, keep)
    hold(subject.own.on_pairs(*found(subject, False)), (own * meant(TOKENS["some"], False)).sum(-1), torch.float64)
    scores = query.numpy() @ key.numpy().repeat(2, 1).swapaxes(-1, -2) / 8**0.5
    share = 1 / (1 + np.exp(sinks.numpy()[:, None] - np.log(np.exp(scores).sum(-1))))
    norms = np.linalg.norm(value.numpy(), axis=-1).repeat(2, 1)
    np.testing.assert_allclose(
        subject.moved("value"), (own * norms[:, :, None]).sum(-1) * share, rtol=1e-12, atol=1e-300
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_are_not_finite(dtype):
    """A key of NaN and a score of +∞ reach the queries that see them, and no other; masked pairs have no weight."""
    query, key, _ = operands(dtype, key_heads=4)
    key[0, 1, 33, 2], query[1, 2, 50] = torch.nan, torch.inf
    subject = Subject(make_problem(query, key, mask=ch.Causal()), True, tokens=(None, TOKENS["some"]))
    for earlier in (False, True):
        pairs, groups = found(subject, earlier)
        fast, slow = (subject.own.on_pairs(pairs, of) for of in (groups, None))
        torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert fast[0, 1, 34:].isnan().all() and fast[0, 1, :33].isfinite().all() and fast[0, 0].isfinite().all()
    before = subject.own.on(one_key(subject.problem, torch.arange(70)[None] - 1))
    assert before[0, 1, 34:].isnan().all() and before[0, 1, :33].isfinite().all() and before[1, 3].isfinite().all()
    assert before[1, 2, 50].isnan() and before[1, 2, :50].isfinite().all()


def test_large_scores_keep_their_digits():
    query, key, _ = operands(torch.float32)
    query = query * 1000
    subject = Subject(make_problem(query, key, mask=ch.Causal()), True, tokens=(None, TOKENS["all equal"]))
    pairs, groups = found(subject, False)
    torch.testing.assert_close(
        subject.own.on_pairs(pairs, groups), subject.own.on_pairs(pairs, None), rtol=0, atol=2e-6
    )


def test_a_score_without_a_normal_form():
    query, key, _ = operands(torch.float64, key_heads=4)
    problem = make_problem(query, key, score=lambda q, k: -(q.unsqueeze(-2) - k.unsqueeze(-3)).abs().sum(-1))
    subject = Subject(problem, True, tokens=(None, TOKENS["one text"]))
    scores = -np.abs(query.numpy()[..., :, None, :] - key.numpy()[..., None, :, :]).sum(-1)
    own = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    hold(subject.own.on_pairs(*found(subject, True)), (own * meant(TOKENS["one text"], True)).sum(-1), torch.float64)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_intervals_and_any_tokens(data):
    """Lists of intervals in any sequence and head: the pairs side by side are those that the mask allows."""
    queries, keys, words = (data.draw(st.integers(1, n)) for n in (40, 40, 8))
    seed, count = data.draw(st.integers(0, 2**31)), data.draw(st.integers(1, 3))
    generator = np.random.default_rng(seed)
    lead = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    edges = np.sort(generator.integers(0, keys + 1, (*lead, queries, 2 * count)), -1)
    start, stop = torch.from_numpy(edges[..., 0].copy()), torch.from_numpy(edges[..., -1].copy())
    gaps = tuple(torch.from_numpy(edges[..., i:-1:2].copy()) for i in (1, 2)) if count > 1 else None
    keep = np.zeros((*lead, queries, keys), bool)
    for i in range(count):
        low, high = (edges[..., 2 * i + side, None] for side in (0, 1))
        keep |= (np.arange(keys) >= low) & (np.arange(keys) < high)

    class Given(ch.extend.Mask):
        def lower(self, sizes):
            return ch.extend.Spans(start, stop, gaps=gaps)

    query, key = (torch.from_numpy(generator.normal(size=(2, 2, n, 4))) for n in (queries, keys))
    asked, held = (
        torch.from_numpy(generator.integers(0, words, (data.draw(st.sampled_from([1, 2])), n))) for n in (queries, keys)
    )
    subject = Subject(make_problem(query, key, mask=Given()), False, tokens=(asked, held))
    pairs = Pairs(asked, held)
    groups = grouped(subject.problem, pairs)
    own = dense(query, key, keep) * (asked[:, :, None] == held[:, None]).numpy()[:, None]
    assert groups is not None
    hold(subject.own.on_pairs(pairs, groups), own.sum(-1), torch.float64)
    hold(subject.own.on_pairs(pairs, None), own.sum(-1), torch.float64)
