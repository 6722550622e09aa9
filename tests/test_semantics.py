"""Semantics that are the same on every engine."""

import numpy as np
import pytest
import torch
from drawn import draw

import clearhead as ch

ENGINES = pytest.mark.parametrize("engine", ["reference", "tiled", "sdpa"])
GUARDED = pytest.mark.parametrize("engine", ["reference", "tiled"])
PARAMETRISED = [
    ch.Dot(),
    ch.Dot(softcap=5.0),
    ch.Bilinear(4, 4),
    ch.Additive(4, 4, 6),
    ch.Cosine(),
    ch.Gaussian(),
]
SCORES = pytest.mark.parametrize("score", PARAMETRISED, ids=str)
SDPA_TAKES = (ch.Dot(), ch.Bilinear(4, 4), ch.Cosine())
PAIRS = pytest.mark.parametrize(
    ("engine", "score"),
    [(engine, score) for engine in ("reference", "tiled") for score in PARAMETRISED]
    + [("sdpa", s) for s in SDPA_TAKES],
    ids=str,
)


def leaves(*tensors):
    return [t.clone().requires_grad_() for t in tensors]


@PAIRS
@pytest.mark.parametrize(
    "mask",
    [ch.Lengths([0, 3]), ~ch.Causal() & ch.Lengths([5, 5]), ch.DenseMask(torch.zeros(5, 5, dtype=torch.bool))],
    ids=lambda mask: mask.title(),
)
def test_a_query_that_sees_nothing_gives_zeros_and_zero_gradients(engine, score, mask):
    query, key, value = leaves(draw(2, 5, 4), draw(2, 5, 4, seed=1), draw(2, 5, 3, seed=2))
    output = ch.attention(query, key, value, score=score, mask=mask, engine=engine)
    blind = ~mask.dense(query, key).any(-1)
    assert blind.any() and (output[blind] == 0).all()
    gradients = torch.autograd.grad(output.square().sum() + output.sum(), [query, key, value, *score.parameters()])
    assert all(g.isfinite().all() for g in gradients)
    assert (gradients[0][blind] == 0).all()
    with torch.no_grad():
        weights = ch.weights(query, key, score=score, mask=mask)
        assert (weights.dense()[blind] == 0).all() and (weights.entropy()[blind] == 0).all()
        assert (weights.logsumexp()[blind] == -torch.inf).all()


@PAIRS
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "mask",
    [
        ch.Lengths([3, 5]),
        ch.Padding(torch.tensor([[1, 0, 1, 0, 0], [1, 1, 1, 1, 1]])),
        ch.Padding(torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])),
    ],
)
def test_padding_may_hold_anything(engine, score, bad, mask):
    query, key, value = draw(2, 5, 4), draw(2, 5, 4, seed=1), draw(2, 5, 3, seed=2)
    seen = mask.dense(query, key).any(1)
    dirty_key, dirty_value = (t.masked_fill(~seen.unsqueeze(-1), bad) for t in (key, value))
    results = []
    for k, v in ((key, value), (dirty_key, dirty_value)):
        inputs = leaves(query, k, v)
        output = ch.attention(*inputs, score=score, mask=mask, engine=engine)
        results.append([output, *torch.autograd.grad(output.sum(), [*inputs, *score.parameters()])])
    for clean, dirty in zip(*results, strict=True):
        assert dirty.isfinite().all()
        torch.testing.assert_close(dirty, clean)
    torch.testing.assert_close(
        ch.weights(query, dirty_key, score=score, mask=mask).dense().isfinite().all(), torch.tensor(True)
    )


@GUARDED
@SCORES
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_masked_key_that_is_not_finite_stays_with_those_who_see_it(engine, score, bad):
    query, key, value = leaves(draw(1, 6, 4), draw(1, 6, 4, seed=1), draw(1, 6, 3, seed=2))
    with torch.no_grad():
        key[0, 4, 1], value[0, 4, 0] = bad, bad
    output = ch.attention(query, key, value, score=score, mask=ch.Causal(), engine=engine)
    clean = ch.attention(query[:, :4], key[:, :4], value[:, :4], score=score, mask=ch.Causal(), engine="reference")
    torch.testing.assert_close(output[:, :4], clean)
    assert not output[:, 4:].isfinite().any()
    (gradient,) = torch.autograd.grad(output[:, :4].sum(), query)
    assert gradient[:, :4].isfinite().all()
    rows = ch.weights(query.detach(), key.detach(), score=score, mask=ch.Causal()).dense()[0]
    assert rows[:4].isfinite().all() and not rows[4:, 4].isfinite().any()


@ENGINES
@pytest.mark.parametrize("kind", ["nothing", "mask", "bool", "float"])
def test_inputs_are_never_written_to(engine, kind):
    query, key, value = draw(2, 4, 9, 8), draw(2, 2, 9, 8, seed=1), draw(2, 2, 9, 8, seed=2)
    mask = {
        "nothing": None,
        "mask": ch.Causal() & ch.Lengths([4, 9]),
        "bool": draw(9, 9) > 0,
        "float": draw(9, 9).masked_fill(draw(9, 9, seed=3) > 1, -torch.inf),
    }[kind]
    given = [query, key, value] + ([mask] if isinstance(mask, torch.Tensor) else [])
    before = [t.clone() for t in given]
    ch.attention(query, key, value, mask=mask, engine=engine)
    weights = ch.weights(query, key, mask=mask)
    weights.reduce(
        ch.reductions.Entropy(),
        ch.reductions.TopK(3),
        ch.reductions.Received(),
        ch.reductions.Pool(4),
        ch.reductions.MeanDistance(),
    )
    assert weights[0, 1, 3].shape == (9,) and weights.dense().shape == (2, 4, 9, 9)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


@ENGINES
@pytest.mark.parametrize(
    ("query", "key", "value", "output"),
    [
        ((5, 4), (7, 4), (7, 3), (5, 3)),
        ((2, 5, 4), (2, 7, 4), (2, 7, 3), (2, 5, 3)),
        ((2, 5, 4), (7, 4), (7, 3), (2, 5, 3)),
        ((5, 4), (2, 7, 4), (2, 7, 3), (2, 5, 3)),
        ((2, 6, 5, 4), (2, 6, 7, 4), (2, 6, 7, 3), (2, 6, 5, 3)),
        ((2, 6, 5, 4), (2, 3, 7, 4), (2, 3, 7, 3), (2, 6, 5, 3)),
        ((2, 6, 5, 4), (1, 1, 7, 4), (7, 3), (2, 6, 5, 3)),
        ((1, 1, 5, 4), (2, 6, 7, 4), (2, 6, 7, 3), (2, 6, 5, 3)),
        ((3, 2, 6, 5, 4), (2, 2, 7, 4), (3, 1, 2, 7, 3), (3, 2, 6, 5, 3)),
        ((0, 2, 5, 4), (0, 2, 7, 4), (0, 2, 7, 3), (0, 2, 5, 3)),
        ((2, 6, 0, 4), (2, 6, 7, 4), (2, 6, 7, 3), (2, 6, 0, 3)),
        ((2, 6, 5, 4), (2, 6, 0, 4), (2, 6, 0, 3), (2, 6, 5, 3)),
    ],
    ids=str,
)
def test_shapes_broadcast(engine, query, key, value, output):
    query, key, value = leaves(draw(*query), draw(*key, seed=1), draw(*value, seed=2))
    got = ch.attention(query, key, value, engine=engine)
    assert got.shape == output
    groups = output[-3] // key.shape[-3] if key.ndim > 3 and key.shape[-3] > 1 else 1
    wide_key, wide_value = (
        t.repeat_interleave(groups, -3) if t.ndim > 3 and t.shape[-3] > 1 else t for t in (key, value)
    )
    if key.shape[-2]:
        truth = torch.softmax(query @ wide_key.transpose(-1, -2) / 2, -1) @ wide_value
    else:
        truth = torch.zeros(output)
    torch.testing.assert_close(got, truth.expand(output))
    gradients = torch.autograd.grad(got.sum(), [query, key, value])
    assert all(g.isfinite().all() for g in gradients)


@ENGINES
def test_layouts_do_not_matter(engine):
    mask = ch.Causal() & ch.Lengths([9, 20])
    query, key, value = draw(2, 4, 20, 8), draw(2, 2, 20, 8, seed=1), draw(2, 2, 20, 8, seed=2)
    want = ch.attention(query, key, value, mask=mask, engine=engine)
    transposed = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value)]
    spread = [torch.stack([t, t], -1)[..., 0] for t in (query, key, value)]
    for layout in (transposed, spread):
        torch.testing.assert_close(ch.attention(*layout, mask=mask, engine=engine), want)


SECOND = {"nothing": None, "causal": ch.Causal(), "window": ch.SlidingWindow(before=5), "lengths": ch.Lengths([3, 20])}


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("length", [20, 600])
@pytest.mark.parametrize(
    ("engine", "dtype"),
    [("native", torch.float32), *((e, d) for e in (None, "sdpa", "tiled") for d in (torch.float32, torch.float64))],
)
def test_second_derivatives_at_any_size_on_every_engine(length, engine, name, dtype):
    """Those of the engines' own kernels too, of which PyTorch's has none."""
    inputs = [draw(2, heads, length, 8, seed=i, dtype=dtype).requires_grad_() for i, heads in enumerate((4, 2, 2))]
    found = []
    for each in (engine, "reference"):
        output = ch.attention(*inputs, mask=SECOND[name], engine=each)
        first = torch.autograd.grad(output.sin().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), inputs)
        found.append((output, *first, *second))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4 * float(want.detach().abs().max()), rtol=1e-4)


def test_float_mask_is_added_and_may_be_learnt():
    query, key, value = draw(2, 4, 5, 8), draw(2, 4, 7, 8, seed=1), draw(2, 4, 7, 8, seed=2)
    bias = draw(4, 5, 7, seed=3)[None].requires_grad_()
    got = ch.attention(query, key, value, mask=bias)
    want = torch.softmax(query @ key.transpose(-1, -2) / 8**0.5 + bias, -1) @ value
    torch.testing.assert_close(got, want)
    (a,), (b,) = (torch.autograd.grad(out.square().sum(), bias) for out in (got, want))
    torch.testing.assert_close(a, b)
    assert ch.plan(query, key, value, mask=bias).engine == "native"


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a,
        lambda a: a[::-1],
        lambda a: np.asfortranarray(a),
        lambda a: np.lib.stride_tricks.as_strided(a, writeable=False),
        lambda a: (a * 10).astype(np.int64),
        lambda a: a.astype(np.float32),
    ],
    ids=["plain", "reversed", "fortran", "read-only", "integers", "float32"],
)
def test_numpy_in_numpy_out(change):
    arrays = [change(draw(2, 6, 4, seed=i, dtype=torch.float64).numpy()) for i in range(3)]
    before = [a.copy() for a in arrays]
    with np.errstate(all="raise"):
        output = ch.attention(*arrays, mask=ch.Lengths(np.array([3, 6])))
    wide = [torch.from_numpy(np.ascontiguousarray(a.astype(a.dtype.newbyteorder("=")))) for a in arrays]
    wide = [t if t.is_floating_point() else t.double() for t in wide]
    assert isinstance(output, np.ndarray) and output.dtype == (
        np.float32 if wide[0].dtype == torch.float32 else np.float64
    )
    np.testing.assert_allclose(output, ch.attention(*wide, mask=ch.Lengths([3, 6])), rtol=1e-5)
    assert all(np.array_equal(a, b) for a, b in zip(arrays, before, strict=True))
    weights = ch.weights(*arrays[:2])
    assert isinstance(weights[0].dense(), np.ndarray) and isinstance(weights[0, 2], np.ndarray)
    assert isinstance(weights.entropy(), np.ndarray)
    assert all(isinstance(part, np.ndarray) for part in weights.topk(2))
    assert isinstance(weights @ arrays[2], np.ndarray) and isinstance(ch.Dot()(*arrays[:2]), np.ndarray)


def test_masked_softmax_takes_lists_masks_and_arrays():
    assert ch.masked_softmax([[0, 0, 5]], [2]).tolist() == [[0.5, 0.5, 0.0]]
    assert ch.masked_softmax([[[0, 0, 5]], [[0, 0, 0]]], [1, 3])[0].tolist() == [[1, 0, 0]]
    assert ch.masked_softmax([0.0, 0.0]).tolist() == [0.5, 0.5]
    assert ch.masked_softmax(np.zeros((1, 2, 2)), ch.Causal()).tolist() == [[[1, 0], [0.5, 0.5]]]
    assert ch.masked_softmax(torch.zeros(2, 1, 3), [0, 3])[0].tolist() == [[0, 0, 0]]
    along_keys = ch.masked_softmax(torch.zeros(2, 4, 3), [1, 4], dim=1)
    assert along_keys[0, :, 0].tolist() == [1, 0, 0, 0] and along_keys[1, 0].tolist() == [0.25] * 3


def test_scores_call_gives_raw_scores_for_grouped_heads():
    query, key = draw(2, 6, 5, 4), draw(2, 3, 7, 4, seed=1)
    want = query @ key.repeat_interleave(2, 1).transpose(-1, -2) / 2
    torch.testing.assert_close(ch.Dot()(query, key), want)
    torch.testing.assert_close(ch.weights(query, key, mask=ch.Lengths([1, 1])).scores(), want)


def test_from_weights_shares_parameters_and_copies_the_rest():
    parameter = torch.nn.Parameter(draw(6, 4))
    w_v = draw(6)
    score = ch.Additive.from_weights(parameter, None, w_v)
    assert score.W_q is parameter and score.W_k is None and score.w_v.data_ptr() != w_v.data_ptr()
    query, key = draw(5, 4), draw(7, 6, seed=1)
    want = torch.tanh((query @ parameter.T)[:, None] + key[None]) @ w_v
    torch.testing.assert_close(score(query, key), want)


def test_from_weights_takes_the_weight_of_a_linear_layer_of_one_output():
    last, W_q, W_k = torch.nn.Linear(6, 1, bias=False), draw(6, 4), draw(6, 5)
    query, key, value = draw(2, 3, 4), draw(2, 7, 5), draw(2, 7, 2)
    hidden = torch.tanh((query @ W_q.T)[..., :, None, :] + (key @ W_k.T)[..., None, :, :])
    expected = torch.softmax(last(hidden).squeeze(-1), -1) @ value
    for weight in (last.weight, last.weight.detach(), last.weight.detach().numpy()):
        score = ch.Additive.from_weights(W_q, W_k, weight)
        for engine in ("native", "tiled", "reference"):
            torch.testing.assert_close(ch.attention(query, key, value, score=score, engine=engine), expected)
        assert "hidden_dim=6" in repr(score)
        torch.testing.assert_close(ch.explain(query, key, value, score=score)["output"], expected.detach())
    score = ch.Additive.from_weights(W_q, W_k, last.weight)
    assert score.w_v is last.weight
    (want,) = torch.autograd.grad(expected.square().sum(), [last.weight])
    (got,) = torch.autograd.grad(ch.attention(query, key, value, score=score).square().sum(), [last.weight])
    torch.testing.assert_close(got, want)


LENGTHS = {
    "a list": [2, 5],
    "one for each query": torch.tensor([[1, 2, 3], [0, 5, 4]]),
    "an array": np.array([0, 3]),
}


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("mask", [None, "causal", "matrix", "float"])
def test_lengths_are_taken_as_modules_take_them(name, mask):
    query, key, value = draw(2, 3, 4), draw(2, 5, 4, seed=1), draw(2, 5, 2, seed=2)
    lengths = torch.as_tensor(LENGTHS[name])
    keep = (torch.arange(5) < (lengths[:, None, None] if lengths.ndim == 1 else lengths[..., None])).expand(2, 3, 5)
    scores, matrix = query @ key.mT / 2, draw(3, 5, seed=3) > -0.5
    given = {"causal": ch.Causal(), "matrix": matrix, "float": draw(3, 5, seed=4)}.get(mask)
    if mask == "float":
        scores = scores + given
    elif mask:
        keep = keep & (matrix if mask == "matrix" else torch.ones(3, 5).tril(2).bool())
    weights = scores.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num(0.0)
    options = {"mask": given, "valid_lens": LENGTHS[name], "align": "lower_right"}
    torch.testing.assert_close(ch.attention(query, key, value, **options), weights @ value)
    torch.testing.assert_close(ch.weights(query, key, **options)[:], weights)
    torch.testing.assert_close(ch.explain(query, key, value, **options)["output"], weights @ value)
    torch.testing.assert_close(ch.nn.DotProductAttention()(query, key, value, **options), weights @ value)
    half = [ch.partial(query, key[:, a:b], value[:, a:b], keys=(a, 5), **options) for a, b in ((0, 2), (2, 5))]
    torch.testing.assert_close(half[0].merge(half[1]).finish(), weights @ value)
    skipped = ch.plan(query, key, value, **options), ch.plan(query, key, value, mask=given, align="lower_right")
    assert skipped[0].computed <= skipped[1].computed
    blind = "queries that see nothing" in [finding.name for finding in ch.diagnose(query, key, value, **options)]
    assert blind == bool((weights == 0).all(-1).any())


def test_lengths_that_are_no_lengths_are_one_error():
    x = draw(2, 3, 4)
    for wrong, why in (
        (ch.Lengths([1, 2]), "Pass a mask as mask="),
        (torch.ones(2).bool(), "of torch.bool"),
        (2, "one for each sequence"),
        ([7, 1], "holds 7"),
    ):
        with pytest.raises(ch.ClearheadError, match=why):
            ch.attention(x, x, x, valid_lens=wrong)


def test_plan_counts_what_the_mask_saves():
    x = draw(4, 8, 512, 16)
    plan = ch.plan(x, x, x, mask=ch.Lengths([512, 128, 256, 64]))
    assert plan.engine == "native" and plan.skipped == 1 - (512 + 128 + 256 + 64) / (4 * 512)
    assert ch.plan(x, x, x).skipped == 0
    assert 0.45 < ch.plan(x, x, x, mask=ch.Causal()).skipped < 0.5
    window = ch.plan(x, x, x, mask=ch.SlidingWindow(before=31), engine="tiled")
    assert 0.3 < window.skipped < 1 and window.engine == "tiled"
    plan = ch.plan(x, x, x, score=ch.Gaussian())
    assert plan.engine == "native" and "sq_diff" in plan.declined["sdpa"][0]
    assert "computes every pair at once" in plan.declined["reference"][0]


def test_a_score_of_ones_own_is_one_method():
    class Manhattan(ch.extend.Score):
        def tile(self, query, key):
            return -(query.unsqueeze(-2) - key.unsqueeze(-3)).abs().sum(-1)

    query, key, value = leaves(draw(2, 4, 9, 3), draw(2, 2, 9, 3, seed=1), draw(2, 2, 9, 3, seed=2))
    for score in (Manhattan(), Manhattan().tile):
        got = ch.attention(query, key, value, score=score, mask=ch.Causal())
        wide = key.repeat_interleave(2, 1)
        scores = -(query.unsqueeze(-2) - wide.unsqueeze(-3)).abs().sum(-1)
        keep = torch.ones(9, 9, dtype=torch.bool).tril()
        want = scores.masked_fill(~keep, -torch.inf).softmax(-1) @ value.repeat_interleave(2, 1)
        torch.testing.assert_close(got, want)
        assert ch.weights(query.detach(), key.detach(), score=score)[0, 0].shape == (9, 9)
