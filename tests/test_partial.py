"""partial(): parts of the keys, in any split, order and nesting, merge to the whole, outputs and gradients."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead as ch

ENGINES = {"native": torch.float32, "tiled": torch.float64, "reference": torch.float64}
SINKS = torch.tensor([0.5, -2.0, 3.0, 0.0])


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def masks(lq, lk):
    keep = (torch.arange(lq)[:, None] * 7 + torch.arange(lk) * 3) % 5 < 2
    keep[lq // 2] = False
    return {
        "none": None,
        "causal": ch.Causal(),
        "window": ch.SlidingWindow(before=4, after=1),
        "lengths": ch.Lengths([lk // 2, 0]),
        "dense": ch.DenseMask(keep),
        "float": draw(lq, lk, seed=4).masked_fill(~keep, -torch.inf),
    }


BIASES = {
    "none": lambda lq, lk: None,
    "alibi": lambda lq, lk: ch.ALiBi(4),
    "dense": lambda lq, lk: ch.DenseBias(draw(1, 4, lq, lk, seed=5)),
    "function": lambda lq, lk: ch.BiasFunction(lambda b, h, q, k: -0.1 * (q - k).abs()),
}
SCORES = {
    "dot": lambda: None,
    "additive": lambda: ch.Additive(6, 6, 5),
    "tile": lambda: lambda q, k: -(q.unsqueeze(-2) - k.unsqueeze(-3)).abs().sum(-1),
}


def merged(parts, choose):
    """One of the parts, merged two by two in an order and a nesting that `choose(n)` < n decides."""
    parts = list(parts)
    while len(parts) > 1:
        one = parts.pop(choose(len(parts)))
        other = parts.pop(choose(len(parts)))
        parts.append(one.merge(other))
    return parts[0]


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_any_split_in_any_order_and_nesting_is_the_whole(data):
    engine = data.draw(st.sampled_from(list(ENGINES)))
    dtype = ENGINES[engine]
    lq, lk = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 90))
    name = data.draw(st.sampled_from(list(masks(1, 1))))
    bias = BIASES[data.draw(st.sampled_from(list(BIASES)))](lq, lk)
    torch.manual_seed(1)
    score = SCORES[data.draw(st.sampled_from(list(SCORES)))]()
    by_tile = callable(score) and not isinstance(score, ch.extend.Score)
    if engine == "native" and (by_tile or isinstance(bias, ch.BiasFunction)):
        engine, dtype = "tiled", torch.float64
    score, bias = (t.to(dtype) if isinstance(t, torch.nn.Module) else t for t in (score, bias))
    mask = masks(lq, lk)[name]
    mask = mask.to(dtype) if isinstance(mask, torch.Tensor) else mask
    options = {"mask": mask, "bias": bias, "score": score, "align": "lower_right", "engine": engine}
    sinks = data.draw(st.sampled_from([None, SINKS]))
    query, key, value = draw(2, 4, lq, 6), draw(2, 2, lk, 6, seed=1), draw(2, 2, lk, 3, seed=2)
    leaves = [t.to(dtype).requires_grad_() for t in (query, key, value)]
    if sinks is not None:
        leaves.append(sinks.to(dtype).requires_grad_())
    cuts = sorted(data.draw(st.lists(st.integers(0, lk), max_size=5)))
    borders = list(zip([0, *cuts], [*cuts, lk], strict=True))  # some parts are empty
    query, key, value = leaves[:3]
    parts = [ch.partial(query, key[:, :, a:b], value[:, :, a:b], keys=(a, lk), **options) for a, b in borders]
    whole = merged(parts, lambda n: data.draw(st.integers(0, n - 1)))
    got = whole.finish(*leaves[3:])
    want = ch.attention(query, key, value, sinks=None if sinks is None else leaves[3], **options)
    rows = ch.weights(query, key, **options).logsumexp()
    close = {"atol": 1e-10, "rtol": 1e-9} if dtype == torch.float64 else {"atol": 2e-5, "rtol": 1e-4}
    torch.testing.assert_close(got, want, **close)
    torch.testing.assert_close(whole.logsumexp, rows, **close)
    to_output, to_rows = draw(*want.shape, seed=7).to(dtype), draw(*rows.shape, seed=8).to(dtype)
    losses = [(o * to_output).sum() + (r.masked_fill(r == -torch.inf, 0.0) * to_rows).sum() for o, r in
              ((got, whole.logsumexp), (want, rows))]  # fmt: skip
    for name, one, two in zip(
        ("query", "key", "value", "sinks"), *(torch.autograd.grad(x, leaves) for x in losses), strict=False
    ):
        torch.testing.assert_close(one, two, **close, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("engine", ENGINES)
def test_two_empty_rows_merge_with_zero_gradients(engine):
    query, key, value = (draw(1, 1, 3, 4, seed=s, dtype=ENGINES[engine]).requires_grad_() for s in range(3))
    parts = [
        ch.partial(query, key, value, mask=ch.Lengths([[0, 2, n]]), keys=(3 * i, 6), engine=engine)
        for i, n in enumerate((3, 6))
    ]
    both = parts[0].merge(parts[1])
    assert both.logsumexp[0, 0, 0] == -torch.inf and (both.output[0, 0, 0] == 0).all()
    assert (both.finish(torch.zeros(1))[0, 0, 0] == 0).all()
    loss = both.finish(torch.zeros(1)).sum() + both.logsumexp[0, 0, 1:].sum()
    for gradient in torch.autograd.grad(loss, (query, key, value), retain_graph=True):
        assert gradient.isfinite().all()
    nothing = both.output[0, 0, 0].sum() + both.logsumexp[0, 0, 0].nan_to_num(neginf=0.0)
    assert all((g == 0).all() for g in torch.autograd.grad(nothing, (query, key, value)))


def test_no_digit_is_lost_where_scores_are_large():
    query, key, value = torch.full((1, 1), 300.0), torch.full((64, 1), 300.0), torch.randn(64, 3)
    parts = [ch.partial(query, key[i : i + 16], value[i : i + 16], scale=1.0) for i in range(0, 64, 16)]
    whole = merged(parts, lambda n: 0)
    torch.testing.assert_close(whole.finish(), value.mean(0, keepdim=True))
    assert whole.logsumexp.item() == pytest.approx(90000 + np.log(64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_merged_in_float32(dtype):
    """The same as a merge of the parts in float64; and off the truth by two roundings: weights may be rounded to the
    dtype where they are multiplied, and the output is."""
    query, key, value = (draw(1, 2, 40, 16, seed=s, dtype=dtype) for s in range(3))
    parts = [ch.partial(query, key[:, :, i : i + 10], value[:, :, i : i + 10], keys=(i, 40)) for i in range(0, 40, 10)]
    whole = merged(parts, lambda n: n - 1)
    assert whole.output.dtype == whole.logsumexp.dtype == torch.float32
    assert whole.finish().dtype == dtype
    sums = torch.stack([part.logsumexp.double() for part in parts])
    joined = (sums.softmax(0)[..., None] * torch.stack([part.output.double() for part in parts])).sum(0)
    torch.testing.assert_close(whole.output.double(), joined, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(whole.logsumexp.double(), sums.logsumexp(0), atol=1e-6, rtol=1e-6)
    assert torch.equal(whole.finish(), whole.output.to(dtype))
    weights = (query.double() @ key.double().mT / 4).softmax(-1)
    output, rounding = weights @ value.double(), torch.finfo(dtype).eps / 2
    allowed = 1.01 * rounding * (weights @ value.double().abs() + output.abs()) + 1e-6
    for found in (whole.finish(), ch.attention(query, key, value, engine="native")):
        assert bool(((found.double() - output).abs() <= allowed).all())


def test_numpy_in_numpy_out():
    query, key, value = (draw(5, 4, seed=s).numpy() for s in range(3))
    one, two = ch.partial(query, key[:2], value[:2]), ch.partial(query, key[2:], value[2:])
    whole = one.merge(two)
    assert all(isinstance(x, np.ndarray) for x in (whole.output, whole.logsumexp, whole.finish(np.zeros(1))))
    np.testing.assert_allclose(whole.finish(), ch.attention(query, key, value))
    assert whole.finish(np.zeros(1)).shape == whole.output.shape
    whole.output[:] = 5  # a copy
    np.testing.assert_allclose(whole.finish(), ch.attention(query, key, value))


@pytest.mark.parametrize("engine", [None, "native", "tiled", "reference"])
def test_in_compiled_code(engine):
    query, key, value = (draw(1, 2, 8, 6, seed=s, dtype=torch.float32).requires_grad_() for s in range(3))

    def run(query, key, value):
        parts = [
            ch.partial(query, key[:, :, a:b], value[:, :, a:b], keys=(a, 8), mask=ch.Causal(), engine=engine)
            for a, b in ((0, 3), (3, 8))
        ]
        whole = parts[1].merge(parts[0])
        return whole.finish(torch.zeros(2)), whole.logsumexp

    want, got = run(query, key, value), torch.compile(run, fullgraph=True, backend="eager")(query, key, value)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)
    for a, b in zip(*(torch.autograd.grad(sum(x.sum() for x in y), (query, key, value)) for y in (want, got)),
                    strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-5)


def test_second_derivatives():
    inputs = [draw(1, 2, 5, 4, seed=s).requires_grad_() for s in range(3)]

    def run(query, key, value):
        given = {"mask": ch.Causal(), "engine": "tiled"}
        parts = [ch.partial(query, key[:, :, a:b], value[:, :, a:b], keys=(a, 5), **given) for a, b in ((0, 2), (2, 5))]
        whole = parts[0].merge(parts[1])
        return whole.output, whole.logsumexp

    assert torch.autograd.gradcheck(run, inputs) and torch.autograd.gradgradcheck(run, inputs)


def test_what_cannot_be_says_why():
    query, key, value = (draw(1, 2, 5, 4, seed=s, dtype=torch.float32) for s in range(3))
    with pytest.raises(ch.UnsupportedError, match="log-sum-exp"):
        ch.partial(query, key, value, engine="sdpa")
    for keys, words in (
        ((3, 7), "would be 3 … 7 of 7"),
        ((-1, 9), "-1"),
        ("ab", "whole number"),
        ((0, 9.0), "whole number"),
        ((0, 2**64), "at most"),
    ):
        with pytest.raises(ch.ClearheadError, match=words):
            ch.partial(query, key, value, keys=keys)
    with pytest.raises(ch.ClearheadError, match="no alignment"):
        ch.partial(query, key, value, keys=(0, 9), mask=ch.Causal())
    with pytest.raises(ch.ShapeError, match=r"\b9\b"):  # a mask is of all keys
        ch.partial(query, key, value, keys=(0, 9), mask=ch.DenseMask(torch.ones(5, 5, dtype=torch.bool)))
    part = ch.partial(query, key, value)
    with pytest.raises(ch.ShapeError, match="same queries"):
        part.merge(ch.partial(query[:, :, :4], key, value))
    with pytest.raises(ch.ClearheadError, match="result of another partial"):
        part.merge(part.output)
    with pytest.raises(ch.ShapeError, match="one logit for each head"):
        part.finish(torch.zeros(3))
