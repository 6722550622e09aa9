"""Biases against the papers' own words, and against the models that have them."""

import math

import pytest
import torch

import clearhead as ch


def test_slopes_of_alibi_are_the_papers():
    assert ch.ALiBi(8).slopes.tolist() == [2**-h for h in range(1, 9)]
    want = [2 ** (-h / 2) for h in range(1, 17)]
    assert ch.ALiBi(16).slopes.tolist() == pytest.approx(want)
    assert ch.ALiBi(12).slopes.tolist() == pytest.approx([2**-h for h in range(1, 9)] + want[0:8:2])


def test_alibi_penalises_the_distance():
    bias = ch.ALiBi(2)(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4), align="lower_right")
    distance = (torch.arange(5)[None] - (torch.arange(3)[:, None] + 2)).abs()
    torch.testing.assert_close(bias[0], -distance * torch.tensor([2**-4, 2**-8])[:, None, None])


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (4, 300)])
def test_relative_bias_is_t5s(bidirectional, queries, keys):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5", reason="the extra [models] is not installed")
    config = t5.T5Config(num_heads=4, d_model=32, is_decoder=not bidirectional)
    own = t5.T5Attention(config, has_relative_attention_bias=True)
    bias = ch.RelativeBias(4, bidirectional=bidirectional)
    bias.load_state_dict({"weight": own.relative_attention_bias.weight})
    want = own.compute_bias(queries, keys)
    got = bias(torch.zeros(1, 4, queries, 2), torch.zeros(1, 4, keys, 2), align="upper_left")
    torch.testing.assert_close(got, want, atol=0, rtol=0)


def test_relative_biases_take_no_matrix():
    """Only what a block needs of the bias exists: one number a distance is kept."""
    sizes = ch.masks.base.Sizes(1, 8, 4096, 4096)
    for bias in (ch.ALiBi(8), ch.RelativeBias(8)):
        assert sum(t.numel() for t in bias.lower(sizes).tensors) == 8 * (2 * 4096 - 1)


@pytest.mark.parametrize("engine", ["reference", "tiled"])
@pytest.mark.parametrize("bias", [ch.ALiBi(2), ch.RelativeBias(2, 8, 20), ch.DenseBias(torch.rand(6, 6))], ids=str)
def test_gradients_repeat(bias, engine):
    bias.requires_grad_()
    for buffer in bias.buffers():
        buffer.requires_grad_()
    learnt = [*bias.parameters(), *bias.buffers()]
    x = torch.rand(3, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    once, again = (
        torch.autograd.grad(ch.attention(x, x, x, bias=bias, engine=engine).square().sum(), learnt)[0] for _ in range(2)
    )
    assert torch.equal(once, again) and once.abs().sum() > 0


def test_a_float_mask_and_a_bias_are_both_added():
    x = torch.rand(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    first, second = torch.randn(5, 5), torch.randn(2, 1, 1, 5)
    got = ch.attention(x, x, x, mask=first, bias=ch.DenseBias(second) + ch.ALiBi(3))
    scores = x @ x.transpose(-1, -2) / 2 + first + second + ch.ALiBi(3)(x, x)
    torch.testing.assert_close(got, scores.softmax(-1) @ x)
    torch.testing.assert_close(
        ch.weights(x, x, mask=first, bias=second)[1, 2, 3],
        ((x @ x.transpose(-1, -2) / 2 + first + second).softmax(-1)[1, 2, 3]),
    )


@pytest.mark.parametrize(
    "index", [(0, 1), (0, 1, 3), (slice(None), 1, slice(1, 6, 2)), (0, ..., 4), (0, 1, slice(2, 5), 3)]
)
def test_a_part_of_the_weights_has_its_part_of_the_bias(index):
    query, key = (torch.rand(2, 4, 7, 8, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    options = {"bias": ch.RelativeBias(4, 8, 20) + ch.DenseBias(torch.rand(7, 7)), "mask": ch.Causal()}
    options["bias"].requires_grad_(False)
    for sinks in (None, torch.randn(4)):
        weights = ch.weights(query, key, sinks=sinks, **options)
        whole = ch.weights(query, key, sinks=sinks, engine="reference", **options).dense()
        torch.testing.assert_close(torch.as_tensor(weights[index]), whole[index])


def test_weights_with_sinks_sum_to_less_than_one():
    query, key = (torch.randn(2, 4, 7, 8, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    sinks = torch.tensor([-50.0, 0.0, 1.0, 50.0])
    weights = ch.weights(query, key, sinks=sinks, mask=ch.Lengths([7, 0]))
    scores = query @ key.transpose(-1, -2) / math.sqrt(8)
    denominator = scores.exp().sum(-1) + sinks.exp()[:, None]
    want = scores.exp() / denominator.unsqueeze(-1)
    dense = weights.dense()
    torch.testing.assert_close(dense[0], want[0])
    assert (dense[1] == 0).all() and (weights.logsumexp()[1] == -torch.inf).all() and (weights.entropy()[1] == 0).all()
    torch.testing.assert_close(weights.logsumexp()[0], denominator.log()[0])
    alone = scores.softmax(-1)  # how spread the keys' weights are does not depend on the sink
    torch.testing.assert_close(weights.entropy()[0], -torch.xlogy(alone, alone).sum(-1)[0])
    share = weights.reduce(ch.reductions.SinkShare())
    torch.testing.assert_close(share[0], (sinks.exp()[:, None] / denominator)[0])
    assert (share[1] == 0).all()
    values, indices = weights.topk(7)
    torch.testing.assert_close(values[0], want[0].gather(-1, indices[0]))
    torch.testing.assert_close(weights.pool(7)[0], want[0])
    torch.testing.assert_close(weights.received()[0], want[0].sum(-2))


class Decay(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.tensor([0.5, 0.1]))

    def forward(self, batch, head, query_index, key_index):
        return -self.slope[head] * (query_index - key_index).abs() * (1 + batch)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_function_is_the_bias_that_it_writes_out(compiled, monkeypatch):
    """A module that learns, over many blocks, beside a bias by distance; also in compiled code."""
    monkeypatch.setattr("clearhead.problem.regions.BUDGET", 2000)
    query, key, value = (torch.randn(2, 2, 40, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    decay, alibi, index = Decay().double(), ch.ALiBi(2).double(), torch.arange(40)

    def attend(dense):
        places = (torch.arange(2).view(2, 1, 1, 1), torch.arange(2).view(1, 2, 1, 1), index[:, None], index)
        rule = ch.DenseBias(decay(*places)) if dense else ch.BiasFunction(decay)
        return ch.attention(query, key, value, mask=ch.Causal(), bias=rule + alibi)

    found = []
    for dense in (True, False):
        call = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled and not dense else attend
        output = call(dense)
        leaves = (query, key, value, decay.slope)
        found.append([output, *torch.autograd.grad(output.sin().sum(), leaves)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("engine", ["sdpa", "tiled", "reference"])
def test_a_function_on_every_engine_that_can(engine):
    x, rule = torch.randn(1, 2, 9, 4), lambda batch, head, query, key: torch.sin(head + query * 2.0 - key)
    dense = rule(0, torch.arange(2).view(2, 1, 1), torch.arange(9)[:, None], torch.arange(9))
    with torch.no_grad():
        got = ch.attention(x, x, x, bias=ch.BiasFunction(rule), mask=ch.Causal(), engine=engine)
    torch.testing.assert_close(got, ch.attention(x, x, x, bias=dense[None], mask=ch.Causal()))
    with pytest.raises(ch.UnsupportedError, match="bias is a function"):
        ch.attention(x, x, x, bias=ch.BiasFunction(rule), engine="native")


def test_weights_and_records_of_a_function():
    table = torch.randn(9, 9)
    bias = ch.BiasFunction(lambda batch, head, query, key: table[query, key])
    x = torch.randn(1, 2, 9, 4)
    w = ch.weights(x, x, bias=bias)
    want = ch.weights(x, x, bias=table.clone())
    torch.testing.assert_close(w[0, 1, ::2, 3:7], want.dense()[0, 1, ::2, 3:7])
    torch.testing.assert_close(w.entropy(), want.entropy())

    class Model(torch.nn.Module):
        def forward(self, x):
            return ch.attention(x, x, x, bias=bias)

    model = Model()
    with ch.watch(model) as seen:
        model(x)
    torch.testing.assert_close(seen.calls[0].weights.dense(), want.dense())
    table.zero_()
    torch.testing.assert_close(w.dense(), ch.weights(x, x).dense())  # weights follow what they are computed from


def test_what_a_function_reads_must_stay_until_the_backward_pass(monkeypatch):
    monkeypatch.setattr("clearhead.problem.regions.BUDGET", 50)
    table, x = torch.randn(9, 9), torch.randn(1, 2, 9, 4, requires_grad=True)
    out = ch.attention(x, x, x, bias=ch.BiasFunction(lambda batch, head, query, key: table[query, key]))
    table.add_(1.0)
    with pytest.raises(ch.ClearheadError, match=r"that the bias of attention\(\) reads, .* was modified"):
        out.sum().backward()


class Ruled(torch.nn.Module):
    """A bias made of an activation: no tensor that could be copied deeply."""

    def __init__(self):
        super().__init__()
        self.linear, self.attend = torch.nn.Linear(8, 1), ch.nn.MultiHeadAttention(8, 2)

    def forward(self, x):
        heights = self.linear(x)
        rule = ch.BiasFunction(lambda batch, head, query, key: heights[batch, key, 0])
        return self.attend(x, x, x, bias=rule + ch.DenseBias(heights.transpose(1, 2)[:, None]))


def test_watching_a_function_of_an_activation():
    model, x = Ruled(), torch.randn(2, 7, 8)
    with ch.watch(model) as seen:
        model(x)
    with torch.no_grad():
        heights = model.linear(x)[..., 0]
    query, key = seen.calls[0].query, seen.calls[0].key
    want = ch.weights(query, key, bias=2 * heights[:, None, None]).dense()
    torch.testing.assert_close(seen.calls[0].weights.dense(), want)


def test_records_of_a_function_are_detached_and_notice_writes():
    height, x = torch.nn.Parameter(torch.tensor(0.3)), torch.randn(1, 5, 8)
    attend = ch.nn.MultiHeadAttention(8, 2)
    model = torch.nn.Sequential(attend)
    for bias in (
        ch.BiasFunction(lambda batch, head, query, key: height * (query - key)),
        ch.BiasFunction(lambda batch, head, query, key: height * (query - key)) + ch.ALiBi(2),
    ):
        model.forward = lambda x, bias=bias: attend(x, x, x, bias=bias)
        with ch.watch(model) as seen:
            model(x)
        own, watched = attend.attention_weights, seen.calls[0].weights
        before = watched.dense()
        for weights in (own, watched):
            assert not weights.dense().requires_grad and not weights[0, 1].dense().requires_grad
            torch.testing.assert_close(weights.dense(), before)
        assert "detached" in repr(own)
        with torch.no_grad():
            height.mul_(-3.0)
        with pytest.raises(ch.ClearheadError, match="was modified in place after the call"):
            own.dense()
