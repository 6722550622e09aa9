"""Statistics of the weights have gradients: those of autograd through dense weights, on every engine, twice."""

import copy

import pytest
import torch

import clearhead as ch
from clearhead.engines.native import bindings, blocks
from clearhead.problem import regions

LQ, LK = 37, 33
ENGINES = {"native": torch.float32, "tiled": torch.float64, "reference": torch.float64}
SCORES = {
    "dot": lambda: None,
    "capped": lambda: ch.Dot(softcap=1.5),
    "bilinear": lambda: ch.Bilinear(8, 8),
    "additive": lambda: ch.Additive(8, 8, 6),
    "gaussian": lambda: ch.Gaussian(),
}
MASKS = {
    "none": lambda: None,
    "causal": lambda: ch.Causal(),
    "window": lambda: ch.SlidingWindow(before=5, after=2) & ch.Lengths([20, 0]),
    "dense": lambda: ch.DenseMask(draw(LQ, LK, seed=9) < -0.3),
}
FACTORS = torch.linspace(-1, 2, LQ, dtype=torch.float64)
REDUCTIONS = {
    "entropy": ch.reductions.Entropy(),
    "log-sum-exp": ch.reductions.LogSumExp(),
    "max score": ch.reductions.MaxScore(),
    "sink share": ch.reductions.SinkShare(),
    "mass": ch.reductions.Mass(torch.arange(LK) % 3),
    "top": ch.reductions.TopK(4),
    "received": ch.reductions.Received(),
    "received weighted": ch.reductions.Received(FACTORS),
    "received by the last": ch.reductions.Received(slice(-5, None)),
    "mean": ch.reductions.Pool((5, 4), "mean"),
    "mean weighted": ch.reductions.Pool((5, 4), "mean", FACTORS),
    "mean of some": ch.reductions.Pool((5, 4), "mean", slice(3, 30, 2)),
    "distance": ch.reductions.MeanDistance(),
}


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Case:
    """Inputs with gradients, and what `weights` takes beside them."""

    def __init__(self, score, mask, sinks, bias, dtype):
        torch.manual_seed(3)
        self.query, self.key, self.value = draw(2, 4, LQ, 8), draw(2, 2, LK, 8, seed=1), draw(2, 2, LK, 5, seed=2)
        self.score, self.mask = SCORES[score](), MASKS[mask]()
        self.sinks = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64) if sinks else None
        self.bias = draw(1, 4, LQ, LK, seed=4) if bias else None
        for name in ("query", "key", "value", "sinks", "bias"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name).to(dtype).requires_grad_())
        self.score = None if self.score is None else self.score.to(dtype)

    @property
    def leaves(self):
        given = [self.query, self.key, self.value, self.sinks, self.bias]
        return [t for t in given if t is not None] + ([] if self.score is None else list(self.score.parameters()))

    def weights(self, engine):
        options = {"score": self.score, "mask": self.mask, "bias": self.bias, "sinks": self.sinks}
        return ch.weights(self.query, self.key, **options, align="lower_right", engine=engine)

    def dense(self):
        """Finished scores, weights, weights of the keys alone, and which queries see nothing: by the formulas."""
        score = self.score or ch.Dot()
        s = score(self.query, self.key)
        s = s if self.bias is None else s + self.bias
        if self.mask is not None:
            s = s.masked_fill(~self.mask.dense(self.query, self.key, "lower_right"), -torch.inf)
        unseen = s == -torch.inf
        blind = unseen.all(-1, keepdim=True)
        kept = s.masked_fill(blind, 0.0)
        with_sink = kept
        if self.sinks is not None:
            with_sink = torch.cat([kept, self.sinks[:, None, None].expand(*s.shape[:-1], 1)], -1)
        hide = lambda w: w.masked_fill(unseen, 0.0)
        whole = with_sink.softmax(-1)
        share = torch.zeros_like(whole[..., 0]) if self.sinks is None else whole[..., -1].masked_fill(blind[..., 0], 0)
        return s, hide(whole[..., :LK]), hide(kept.softmax(-1)), with_sink.logsumexp(-1), share, blind[..., 0]


def cells(w):
    tall, wide = -(-w.shape[-2] // 5), -(-w.shape[-1] // 4)
    rows = [torch.stack([c.mean((-2, -1)) for c in r.split(wide, -1)], -1) for r in w.split(tall, -2)]
    return torch.stack(rows, -2)


def truth(case):
    s, w, alone, rows, share, blind = case.dense()
    logs = torch.where(alone > 0, alone, 1.0).log()
    gap = (torch.arange(LQ)[:, None] + LK - LQ - torch.arange(LK)).abs()
    counted = w * FACTORS[:, None]
    return {
        "entropy": -(alone * logs).sum(-1),
        "log-sum-exp": rows.masked_fill(blind, -torch.inf),
        "max score": s.max(-1).values,
        "sink share": share,
        "mass": torch.stack([w[..., torch.arange(LK) % 3 == g].sum(-1) for g in range(3)], -1),
        "top": w.topk(4).values,
        "received": w.sum(-2),
        "received weighted": counted.sum(-2),
        "received by the last": w[..., -5:, :].sum(-2),
        "mean": cells(w),
        "mean weighted": cells(counted),
        "mean of some": cells(w[..., 3:30:2, :]),
        "distance": (alone * gap).sum(-1),
        "output": w @ case.value.repeat_interleave(2, 1),
    }


def compare(got, want, leaves, wide_leaves, dtype, name):
    """A result and its gradients, of a random loss over what is finite."""
    finite = want.isfinite()
    assert torch.equal(finite, got.isfinite()), name
    eps = 1e-10 if dtype == torch.float64 else 1e-5
    close = {"atol": eps, "rtol": eps, "msg": lambda m: f"{name}: {m}"}
    torch.testing.assert_close(got.double()[finite], want[finite], **close)
    loss = draw(*want.shape, seed=11)
    pairs = ((got, leaves), (want, wide_leaves))
    every = []
    for result, inputs in pairs:
        total = (result.double().masked_fill(~finite, 0.0) * loss).sum()
        if not total.requires_grad:
            assert name == "sink share"
            return
        found = torch.autograd.grad(total, inputs, allow_unused=True, retain_graph=True)
        every.append(
            [torch.zeros(t.shape).double() if g is None else g.double() for t, g in zip(inputs, found, strict=True)]
        )
    for leaf, one, two in zip(range(len(leaves)), *every, strict=True):
        limit = eps * max(1.0, two.abs().max().item())
        assert (one - two).abs().max() <= limit, f"{name}: gradient {leaf} is off by {(one - two).abs().max():.2g}"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("sinks", [False, True])
def test_statistics_and_gradients_are_those_of_dense_weights(engine, mask, score, sinks, monkeypatch):
    monkeypatch.setattr(regions, "LOOK", 1200)  # several blocks
    dtype = ENGINES[engine]
    case, wide = (Case(score, mask, sinks, mask != "window", d) for d in (dtype, torch.float64))
    if case.score is not None:
        wide.score.load_state_dict(case.score.state_dict())
    want = truth(wide)
    together = case.weights(engine).reduce(ch.reductions.Output(case.value), *REDUCTIONS.values())
    for name, got in zip(["output", *REDUCTIONS], together, strict=True):
        got = got[0] if isinstance(got, tuple) else got
        compare(got, want[name], case.leaves, wide.leaves, dtype, name)
        if name != "output":
            one = case.weights(engine).reduce(REDUCTIONS[name])
            torch.testing.assert_close(one[0] if isinstance(one, tuple) else one, got, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_derivatives_twice(name, monkeypatch):
    monkeypatch.setattr(regions, "LOOK", 40)
    inputs = [draw(1, 2, 6, 2).requires_grad_(), draw(1, 1, 7, 2, seed=1).requires_grad_()]
    inputs.append(torch.tensor([0.5, -0.5], dtype=torch.float64, requires_grad=True))
    reduction = copy.copy(REDUCTIONS[name])
    if name == "mass":
        reduction = ch.reductions.Mass(torch.arange(7) % 3)
    if "weighted" in name:
        reduction = type(reduction)(**{**vars(reduction), "queries": FACTORS[:6]})

    keep = ch.DenseMask(torch.arange(42).view(6, 7) % 5 != 2)

    def run(query, key, sinks):
        w = ch.weights(query, key, sinks=sinks, mask=keep, align="upper_left", engine="tiled")
        found = w.reduce(reduction)
        return found[0] if isinstance(found, tuple) else found

    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(run, inputs, fast_mode=True)  # along random directions, and not each number by itself


def test_second_derivatives_of_the_kernels():
    def run(dtype, engine):
        inputs = [draw(1, 2, 20, 8, seed=s, dtype=dtype).requires_grad_() for s in range(3)]
        w = ch.weights(*inputs[:2], mask=ch.Causal(), engine=engine)
        found = w.reduce(
            ch.reductions.Output(inputs[2]),
            ch.reductions.Entropy(),
            ch.reductions.LogSumExp(),
            ch.reductions.Received(),
            ch.reductions.TopK(3),
            ch.reductions.MaxScore(),
        )
        total = sum((t[0] if isinstance(t, tuple) else t).square().sum() for t in found)
        first = torch.autograd.grad(total, inputs, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), inputs)]

    for one, two in zip(run(torch.float32, "native"), run(torch.float64, "tiled"), strict=True):
        assert (one - two).abs().max() <= 2e-5 * two.abs().max()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_largest_score_sends_its_gradient_to_the_first_of_equal_ones(engine):
    query = torch.ones(1, 1, 2, 1, dtype=ENGINES[engine])
    key = torch.tensor([1.0, 3.0, 2.0, 3.0], dtype=query.dtype).view(1, 1, 4, 1).requires_grad_()
    sinks = torch.tensor([50.0], dtype=query.dtype, requires_grad=True)  # larger than any score
    best = ch.weights(query, key, sinks=sinks, mask=ch.Lengths([[4, 1]]), engine=engine).reduce(
        ch.reductions.MaxScore()
    )
    assert best.flatten().tolist() == [3.0, 1.0]
    found = torch.autograd.grad(best.sum(), (key, sinks), allow_unused=True)
    assert found[0].flatten().tolist() == [1.0, 1.0, 0.0, 0.0]
    assert found[1] is None or found[1].item() == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_how_spread_weights_are_does_not_depend_on_the_sink(engine):
    """Six almost equal weights that sum to next to nothing are as even as without a sink."""
    dtype = ENGINES[engine]
    query, key = (draw(1, 1, 6, 4, seed=s, dtype=dtype).mul(0.01).requires_grad_() for s in (0, 1))
    found = []
    for sinks in (None, torch.tensor([200.0], dtype=dtype)):
        w = ch.weights(query, key, sinks=sinks, engine=engine)
        entropy, distance = w.reduce(ch.reductions.Entropy(), ch.reductions.MeanDistance())
        assert (entropy.exp() > 5.99).all()
        found.append([entropy, distance, *torch.autograd.grad(entropy.sum() + distance.sum(), (query, key))])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, atol=0, rtol=0)


def test_output_entropy_and_rows_are_one_pass(monkeypatch):
    calls, own = [], bindings.summarise
    monkeypatch.setattr(bindings, "summarise", lambda *given: calls.append(given) or own(*given))
    x = draw(1, 2, 30, 8, dtype=torch.float32)
    reductions = [
        ch.reductions.Output(x),
        ch.reductions.Entropy(),
        ch.reductions.LogSumExp(),
        ch.reductions.SinkShare(),
        ch.reductions.MaxScore(),
        ch.reductions.TopK(3),
        ch.reductions.Mass([0] * 30),
    ]
    reductions += [
        ch.reductions.MeanDistance(),
        ch.reductions.Received(),
        ch.reductions.Pool(3, "mean"),
        ch.reductions.Pool(3),
    ]
    ch.weights(x, x).reduce(*reductions)
    assert len(calls) == 1
    ch.weights(x, x, sinks=torch.zeros(2)).reduce(*reductions)
    assert len(calls) == 3  # entropy and distance are of the keys alone


def test_a_residual_that_is_not_made_at_once(monkeypatch):
    x = draw(1, 2, 200, 8, dtype=torch.float32).requires_grad_()
    mask = ch.DenseMask(draw(200, 200, seed=1) < 0.5)
    reductions = ch.reductions.Output(x), ch.reductions.Entropy(), ch.reductions.Received(), ch.reductions.TopK(2)

    def run():
        found = ch.weights(x, x, mask=mask, engine="native").reduce(*reductions)
        return torch.autograd.grad(sum((t[0] if isinstance(t, tuple) else t).square().sum() for t in found), x)[0]

    want = run()
    monkeypatch.setattr(blocks, "KEEP_BYTES", 2**9)
    torch.testing.assert_close(run(), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_surroundings_of_the_gradients(engine, monkeypatch):
    monkeypatch.setattr(regions, "LOOK", 40)
    dtype = ENGINES[engine]
    query, key = (draw(1, 2, 9, 4, seed=s, dtype=dtype).requires_grad_() for s in (0, 1))
    reductions = ch.reductions.Entropy(), ch.reductions.Received()

    def total(query, key):
        found = ch.weights(query, key, mask=ch.Causal(), engine=engine).reduce(*reductions)
        return sum(t.square().sum() for t in found)

    want = torch.autograd.grad(total(query, key), (query, key))
    if engine != "native":
        for got, one in zip(torch.func.grad(total, argnums=(0, 1))(query.detach(), key.detach()), want, strict=True):
            torch.testing.assert_close(got, one)
    again = torch.utils.checkpoint.checkpoint(total, query, key, use_reentrant=False)
    for got, one in zip(torch.autograd.grad(again, (query, key)), want, strict=True):
        torch.testing.assert_close(got, one)
    entropy, received = ch.weights(query, key, mask=ch.Causal(), engine=engine).reduce(*reductions)
    losses = draw(3, *entropy.shape, seed=5, dtype=dtype), draw(3, *received.shape, seed=6, dtype=dtype)
    joint = torch.autograd.grad((entropy, received), (query, key), losses, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        single = torch.autograd.grad((entropy, received), (query, key), [x[i] for x in losses], retain_graph=True)
        for got, one in zip(joint, single, strict=True):
            torch.testing.assert_close(got[i], one)
    with torch.inference_mode():
        assert not ch.weights(query, key, engine=engine).entropy().requires_grad
    with torch.no_grad():
        query.mul_(2)
    if engine != "reference":  # whose one block has saved all that it needs
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(entropy.sum(), query)


def test_what_queries_and_groups_may_be():
    w = ch.weights(draw(2, 3, 5, 4), draw(2, 3, 6, 4))
    dense = w.dense()
    per_head = draw(2, 3, 5, seed=8)
    torch.testing.assert_close(w.reduce(ch.reductions.Received(per_head)), (dense * per_head.unsqueeze(-1)).sum(-2))
    torch.testing.assert_close(
        w.reduce(ch.reductions.Received(per_head[:1, :1])), (dense * per_head[:1, :1, :, None]).sum(-2)
    )
    torch.testing.assert_close(w.reduce(ch.reductions.Pool(2, "max", slice(1, 3))), ch.weights(*slices()).pool(2))
    per_sequence = torch.tensor([[0, 1, 0, 1, 2, 2], [1, 1, 1, 0, 0, 0]])
    for got, b in zip(w.reduce(ch.reductions.Mass(per_sequence)), range(2), strict=True):
        for g in range(3):
            torch.testing.assert_close(got[..., g], dense[b][..., per_sequence[b] == g].sum(-1))
    overlapping = torch.tensor([[1, 1, 0, 0, 1, 1], [0, 1, 1, 1, 1, 0]], dtype=torch.bool)
    torch.testing.assert_close(w.reduce(ch.reductions.Mass(overlapping)), dense @ overlapping.double().T)


def slices():
    return draw(2, 3, 5, 4)[:, :, 1:3], draw(2, 3, 6, 4)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sinks", [False, True])
def test_gradients_of_weights(engine, mask, sinks, monkeypatch):
    monkeypatch.setattr(regions, "LOOK", 1200)
    dtype = ENGINES[engine]
    case, wide = (Case("dot", mask, sinks, True, d) for d in (dtype, torch.float64))
    grad = draw(2, 4, LQ, 5, seed=12)
    weights = wide.dense()[1]
    want = grad @ wide.value.repeat_interleave(2, 1).mT
    g = case.weights(engine).gradients(case.value, grad.to(dtype))
    assert g.shape == weights.shape and g.dtype == dtype and "WeightGradients" in repr(g)
    close = {"atol": 1e-10, "rtol": 1e-9} if dtype == torch.float64 else {"atol": 2e-5, "rtol": 2e-5}
    for index in (..., (1, 3, 17), (0, slice(1, 3), slice(2, 30, 3), slice(5, 20)), (..., None, 4)):
        torch.testing.assert_close(g[index].double(), want[index], **close)
    products = weights * want
    for positive in (False, True):
        kept = products.clamp(min=0) if positive else products
        torch.testing.assert_close(g.by_query(positive).double(), kept.sum(-1), **close)
        torch.testing.assert_close(g.by_key(positive).double(), kept.sum(-2), **close)
    assert not g.by_key().requires_grad


def test_gradients_of_weights_refuse_what_does_not_fit():
    query, key, value = draw(5, 4), draw(6, 4), draw(6, 3)
    w = ch.weights(query, key)
    with pytest.raises(ch.ShapeError, match="expected that of the output"):
        w.gradients(value, draw(5, 4))
    arrays = ch.weights(query.numpy(), key.numpy()).gradients(value.numpy(), draw(5, 3).numpy())
    assert arrays[0].shape == (6,) and type(arrays.by_key()).__module__ == "numpy"


# ---------------------------------------------------------------------------------------- what a fresh eye found broken


def test_a_slice_of_all_queries_before_an_output():
    query, key, value = draw(1, 1, 3, 4), draw(1, 1, 4, 4), draw(1, 1, 4, 2)
    for dtype in (torch.float32, torch.float64):
        inputs = [t.to(dtype) for t in (query, key, value)]
        w = ch.weights(*inputs[:2])
        for first in (
            ch.reductions.Received(slice(0, 3)),
            ch.reductions.Received(slice(0, 2)),
            ch.reductions.Pool(2, queries=slice(0, 3)),
        ):
            torch.testing.assert_close(w.reduce(first, ch.reductions.Output(inputs[2]))[1], ch.attention(*inputs))


@pytest.mark.parametrize("engine", ENGINES)
def test_second_derivatives_where_some_results_depend_on_nothing_learnt(engine):
    dtype = ENGINES[engine]
    query, key = draw(1, 1, 3, 4, dtype=dtype), draw(1, 1, 4, 4, seed=1, dtype=dtype)
    value = draw(1, 1, 4, 2, seed=2, dtype=dtype).requires_grad_()
    part = ch.partial(query, key, value, engine=engine)
    total = part.output.square().sum() + part.logsumexp.sum()
    assert torch.autograd.grad(total, value, create_graph=True)[0].requires_grad
    sinks = torch.zeros(1, dtype=dtype, requires_grad=True)
    found = ch.weights(query, key, sinks=sinks, engine=engine).reduce(
        ch.reductions.LogSumExp(), ch.reductions.MaxScore(), ch.reductions.Received()
    )
    assert torch.autograd.grad(found[0].sum() + found[1].sum(), sinks, create_graph=True)[0].requires_grad


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["sink share", "log-sum-exp", "received", "top", "mass"])
def test_a_large_sink_twice(engine, name):
    """A sink far above the scores, and a query that sees nothing: derivatives are finite, and so are theirs."""
    dtype = ENGINES[engine]
    query, key = (draw(1, 1, 3, 4, seed=s, dtype=dtype).requires_grad_() for s in (0, 1))
    sinks = torch.tensor([800.0], dtype=dtype, requires_grad=True)
    reduction = (
        ch.reductions.Mass([0, 1, 1])
        if name == "mass"
        else REDUCTIONS[name]
        if name != "top"
        else ch.reductions.TopK(2)
    )
    found = ch.weights(query, key, sinks=sinks, mask=ch.Lengths([[3, 0, 2]]), engine=engine).reduce(reduction)
    found = found[0] if isinstance(found, tuple) else found
    total = found.masked_fill(found == -torch.inf, 0.0).square().sum()
    first = torch.autograd.grad(total, (query, key, sinks), create_graph=True)
    second = torch.autograd.grad(sum(g.sum() for g in first), (query, key, sinks), allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in (*first, *second))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_key_that_is_not_finite_stays_with_those_who_see_it(engine):
    dtype = ENGINES[engine]
    query = draw(1, 1, 3, 4, dtype=dtype).requires_grad_()
    key = draw(1, 1, 3, 4, seed=1, dtype=dtype)
    key[0, 0, 2] = torch.nan
    for reduction in (
        ch.reductions.Entropy(),
        ch.reductions.LogSumExp(),
        ch.reductions.MaxScore(),
        ch.reductions.MeanDistance(),
        ch.reductions.Output(key),
    ):
        found = ch.weights(query, key, mask=ch.Causal(), engine=engine).reduce(reduction)
        gradient = torch.autograd.grad(found[0, 0, :2].sum(), query)[0]
        assert gradient[0, 0, :2].isfinite().all() and found[0, 0, :2].isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_value_of_nan_is_nothing_of_the_weights(engine):
    x = draw(1, 1, 4, 4, dtype=ENGINES[engine])
    value = x.clone()
    value[0, 0, 3] = torch.nan
    w = ch.weights(x, x, mask=ch.Causal(), engine=engine)
    output, entropy = w.reduce(ch.reductions.Output(value), ch.reductions.Entropy())
    assert output[0, 0, 3].isnan().all() and output[0, 0, :3].isfinite().all()
    torch.testing.assert_close(entropy, w.entropy())
    part = ch.partial(x, x, value, mask=ch.Causal(), engine=engine)
    assert part.logsumexp.isfinite().all() and part.output[0, 0, 3].isnan().all()


def test_writes_between_are_noticed_or_do_nothing(monkeypatch):
    monkeypatch.setattr(regions, "LOOK", 60)
    for engine, dtype in ENGINES.items():
        query = draw(1, 2, 9, 4, dtype=dtype).requires_grad_()
        for times in (torch.ones(9, dtype=dtype), torch.ones(9, dtype=dtype).numpy()):
            found = ch.weights(query, query, engine=engine).reduce(ch.reductions.Received(times))
            times *= 2
            want = ch.weights(query, query, engine=engine).received()
            for one, two in ((found, want), *zip(*(torch.autograd.grad(f.square().sum(), query) for f in (found, want)),
                                                 strict=True)):  # fmt: skip
                torch.testing.assert_close(one, two)
        inputs = query.detach().clone(), query.detach().clone(), torch.ones(1, 2, 9, 4, dtype=dtype)
        for i in range(3):
            g = ch.weights(inputs[0], query.detach(), engine=engine).gradients(*inputs[1:])
            inputs[i].mul_(2)
            with pytest.raises(ch.ClearheadError, match="modified in place"):
                g.by_query()


def test_the_output_of_recorded_weights_has_the_gradient_of_its_value():
    layer = ch.nn.DotProductAttention()
    x = draw(2, 6, 4)
    layer(x, x, x)
    value = x.clone().requires_grad_()
    output, entropy = layer.attention_weights.reduce(ch.reductions.Output(value), ch.reductions.Entropy())
    assert output.requires_grad and not entropy.requires_grad


@pytest.mark.parametrize("engine", ENGINES)
def test_what_sees_nothing_still_has_a_gradient_of_zero(engine):
    dtype = ENGINES[engine]
    for queries, keys, lengths in ((3, 4, [0]), (0, 4, [2]), (3, 0, [0])):
        query = draw(1, 1, queries, 4, dtype=dtype).requires_grad_()
        key = draw(1, 1, keys, 4, dtype=dtype).requires_grad_()
        w = ch.weights(query, key, mask=ch.Lengths(lengths), engine=engine)
        for reduction in (
            ch.reductions.Entropy(),
            ch.reductions.MaxScore(),
            ch.reductions.Received(slice(1, 1)),
            ch.reductions.LogSumExp(),
        ):
            found = w.reduce(reduction)
            total = found.masked_fill(found == -torch.inf, 0.0).sum()
            assert all((g == 0).all() for g in torch.autograd.grad(total, (query, key), retain_graph=True))


@pytest.mark.parametrize("engine", ["native", "tiled", "reference"])
def test_a_row_of_nan_reaches_the_keys_that_it_sees_and_no_others(engine):
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 60, 4), torch.randn(1, 1, 70, 4)
    k[0, 0, 3] = torch.nan
    keep = torch.rand(60, 70) < 0.2
    keep[:, 3] = False
    keep[11, [3, 9, 66]] = True
    w = ch.weights(q, k, mask=ch.DenseMask(keep), engine=engine)
    dense = w.dense()
    assert torch.equal(dense.isnan()[0, 0], keep & (torch.arange(60) == 11)[:, None])
    assert torch.equal(w.received().isnan(), dense.sum(-2).isnan())
    bad = dense.isnan()[0, 0].view(6, 10, 7, 10).any(3).any(1)
    assert torch.equal(w.pool((6, 7), "mean").isnan()[0, 0], bad)
    assert torch.equal(w.pool((6, 7)).isnan()[0, 0], bad)


@pytest.mark.parametrize("engine", ["native", "tiled"])
def test_sinks_leave_masked_pairs_of_a_row_of_nan_at_0(engine):
    q, k = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 3, 4)
    k[0, 0, 0] = torch.nan
    w = ch.weights(q, k, mask=ch.Lengths([[1, 2]]), sinks=torch.zeros(1), engine=engine)
    assert w.dense()[0, 0].isnan().tolist() == [[True, False, False], [True, True, False]]


@pytest.mark.parametrize("engine", ["native", "tiled", "reference"])
@pytest.mark.parametrize("score", [ch.Dot(), ch.Additive.from_weights(None, None, torch.ones(4)), ch.Gaussian(1.0)])
def test_a_query_that_is_nan_leaves_the_gradients_of_others_alone(engine, score):
    q, k, v = torch.randn(3, 1, 1, 8, 4)
    q[0, 0, 5] = torch.nan
    q.requires_grad_()
    ch.attention(q, k, v, score=score, engine=engine)[0, 0, :5].sum().backward()
    assert not q.grad[0, 0, [0, 1, 2, 3, 4, 6, 7]].isnan().any()
