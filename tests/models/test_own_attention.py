"""clearhead's own attention inside a watched model: one record a call, however many pieces an engine makes of it."""

import pickle

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.scores.base import Pairwise

X = torch.randn(2, 4, 512, 8, generator=torch.Generator().manual_seed(0))
LENGTHS = [512, 300]


class Attend(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options
        self.score = options.get("score")

    def forward(self, x):
        return ch.attention(x, x, x, **self.options)


OPTIONS = {
    "nothing": {},
    "window": {"mask": ch.Causal() & ch.SlidingWindow(before=15)},
    "lengths": {"mask": ch.Lengths(LENGTHS)},
    "holes": {"mask": ch.MaskFunction(lambda b, h, i, j: (i + j) % 3 != 0)},
    "bias": {"bias": ch.ALiBi(4), "mask": ch.Causal()},
    "softcap and sinks": {"score": ch.Dot(0.9, softcap=2.0), "sinks": torch.randn(4)},
    "bilinear": {"score": ch.Bilinear(8, 8)},
    "gaussian": {"score": ch.Gaussian(), "mask": ch.Causal()},
    "additive": {"score": ch.Additive(8, 8, 4), "mask": ch.Lengths(LENGTHS)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("engine", [None, "tiled"])
def test_one_call_one_record(name, engine, tmp_path):
    options = OPTIONS[name]
    model = Attend(**options, engine=engine)
    x = X[..., :32, :] if name in ("additive", "holes") else X
    if name == "additive":
        model.options["mask"] = ch.Lengths([32, 20])
    plain = model(x)
    with ch.watch(model) as seen:
        watched = model(x)
    assert torch.equal(plain, watched)
    (call,) = seen.calls
    assert call.backend.startswith("clearhead ") and call.name == "Attend" and not call.query.requires_grad
    assert not any(parameter.requires_grad for parameter in call.score.parameters())
    rest = {key: value for key, value in model.options.items() if key != "engine"}
    want = ch.weights(x, x, **rest)[:, 1, ::7].detach()
    torch.testing.assert_close(call.weights[:, 1, ::7], want, atol=1e-5, rtol=0)
    (layer,) = seen.layers()
    assert layer.phi == {"gaussian": "sq_diff", "additive": "tanh_add"}.get(name, "mul")
    assert seen.view().write(tmp_path / "page.html").exists()


def test_a_record_outlives_a_change_of_the_scores_parameters():
    model = Attend(score=ch.Additive(8, 8, 4))
    x = X[..., :8, :]
    with ch.watch(model) as seen:
        model(x)
    before = ch.weights(x, x, score=model.score).dense().detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    torch.testing.assert_close(seen.calls[0].weights.dense(), before)


def test_the_modules_of_clearhead_and_plan_inside_a_model():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = ch.nn.MultiHeadAttention(16, 4)

        def forward(self, x):
            ch.plan(x, x, x)
            return self.attn(x, x, x)

    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(2, 10, 16)
    with ch.watch(model) as seen:
        model(x)
    assert seen.names == ["attn"] and len(seen.calls) == 1
    torch.testing.assert_close(seen.calls[0].weights.dense(), model.attn.attention_weights.dense(), atol=1e-5, rtol=0)


def test_a_bias_of_distances_stays_one():
    """ALiBi at a long context: the record holds one number a distance, and no matrix."""
    model = Attend(bias=ch.ALiBi(4), mask=ch.Causal())
    with ch.watch(model) as seen:
        model(X)
    (call,) = seen.calls
    assert sum(tensor.numel() for tensor in call.problem.added) == 4 * (2 * 512 - 1)
    both = Attend(bias=ch.ALiBi(4) + ch.DenseBias(torch.ones(512, 512)))
    with ch.watch(both) as seen:
        both(X)
    torch.testing.assert_close(seen.calls[0].weights[0, 1, 5], ch.weights(X, X, bias=ch.ALiBi(4))[0, 1, 5])


def test_a_batch_that_the_value_alone_has():
    class Model(nn.Module):
        def forward(self, q, k, v):
            return ch.attention(q, k, v, score=ch.Gaussian(), mask=ch.Lengths([3, 7]))

    model, x = Model(), torch.randn(2, 1, 7, 4)
    with ch.watch(model) as seen:
        output = model(x[:1], x[:1], x)
    torch.testing.assert_close(seen.calls[0].weights @ x, output)


def test_sinks_keep_their_digits_and_autocast_its_rounding():
    sinks, x = torch.randn(4) + 1e-3, X[..., :16, :].bfloat16()
    with ch.watch(model := Attend(sinks=sinks)) as seen:
        model(x)
    recorded = seen.calls[0].problem.sinks
    assert torch.equal(recorded, sinks) and recorded is not sinks
    x, score = X[..., :16, :], ch.Additive(8, 8, 4)
    with torch.autocast("cpu", torch.bfloat16), ch.watch(model := Attend(score=score)) as seen:
        model(x)
    assert seen.calls[0].query.dtype == torch.bfloat16


def test_a_dot_product_of_weighted_dimensions_on_the_page():
    class Weighted(ch.extend.Score):
        def tile(self, query, key):
            return (query * torch.arange(1.0, 9.0)) @ key.mT

        def lower(self, query, key):
            return Pairwise("mul", query, key, weight=torch.arange(1.0, 9.0))

    x = X[:, :, :9] / 9
    with ch.watch(model := Attend(score=Weighted())) as seen:
        model(x)
    (layer,) = seen.layers(error=0)
    scores = layer.scale * torch.tensor(layer.query) @ torch.tensor(layer.key).mT
    rows = (scores - torch.tensor(layer.logsumexp)[..., None]).exp().sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows), atol=1e-4, rtol=0)


def test_plan_inside_a_watch_does_not_decline_what_it_chose():
    class Model(nn.Module):
        def forward(self, x):
            ch.attention(x, x, x)
            return ch.plan(x, x, x, mask=ch.Causal())

    with ch.watch(model := Model()):
        plan = model(X)
    assert plan.engine not in plan.declined


@pytest.mark.parametrize("kind", ["raw", "dense", "dense and lengths", "lengths"])
def test_the_mask_of_a_record_is_a_copy(kind):
    keep, lengths = torch.rand(512, 512) < 0.5, torch.tensor(LENGTHS)
    mask = {
        "raw": keep,
        "dense": ch.DenseMask(keep),
        "dense and lengths": ch.DenseMask(keep) & ch.Lengths(lengths),
        "lengths": ch.Lengths(lengths),
    }[kind]
    with ch.watch(model := Attend(mask=mask)) as seen:
        model(X)
    (call,) = seen.calls
    shown, weights = repr(call.mask), call.weights[0, 0, 7]
    mask_dense = call.mask.dense(X, X)
    keep.fill_(True), lengths.zero_()
    again = pickle.loads(pickle.dumps(call))
    for one in (call, again):
        assert repr(one.mask) == shown and torch.equal(one.mask.dense(X, X), mask_dense)
        assert torch.equal(one.weights[0, 0, 7], weights)
