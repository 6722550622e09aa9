"""The one arrangement of autograd over all engines: what comes between a forward and its backward pass."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from drawn import draw
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, checkpoint
from torch.utils.flop_counter import FlopCounterMode

import clearhead as ch
from clearhead.engines.base import Cost, Engine
from clearhead.engines.tiled.engine import Tiled
from clearhead.problem.partial import Partial

ENGINES = pytest.mark.parametrize("engine", ["native", "sdpa", "tiled", "reference"])
WRITTEN_OUT = pytest.mark.parametrize("engine", ["native", "tiled"])


def inputs(length=60, width=8, **options):
    return [draw(1, 2, length, width, seed=seed, **options).requires_grad_() for seed in range(3)]


class Model(torch.nn.Module):
    def forward(self, query, key, value):
        return ch.attention(query, key, value, mask=ch.Causal())


@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, False)])
def test_exported_code_has_gradients_that_were_not_expected(wanted):
    """What needs a gradient when the code is made is not what needs one when it runs."""
    exported = torch.export.export(Model(), tuple(t.detach() for t in inputs(300, 16))).module()
    found = []
    for model in (exported, Model()):
        given = [t.detach().requires_grad_(want) for t, want in zip(inputs(300, 16), wanted, strict=True)]
        some = [t for t in given if t.requires_grad]
        found.append(torch.autograd.grad(model(*given).square().sum(), some))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@ENGINES
@pytest.mark.parametrize("length", [6, 600])
@pytest.mark.parametrize("mask", [None, ch.Causal()], ids=["all", "causal"])
def test_one_tensor_in_several_places(engine, length, mask):
    """Its gradient, as a graph, is counted once for each place, also where one operand is made of another."""
    found = []
    for each in (engine, "reference"):
        x = draw(1, 2, length, 4).requires_grad_()
        key = 2 * x
        output = ch.attention(x, key, key + 1, mask=mask, engine=each)
        (first,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        found.append((first, second))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4 * float(want.detach().abs().max()), rtol=1e-3)


@WRITTEN_OUT
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_backward_pass_under_autocast(engine, create_graph):
    query, key, value = inputs(70)
    run = lambda: ch.attention(query, key, value, mask=ch.Causal(), engine=engine).square().sum()
    want = torch.autograd.grad(run(), (query, key, value))
    loss = run()
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(loss, (query, key, value), create_graph=create_graph)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@WRITTEN_OUT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_hooks_that_keep_another_dtype(engine, dtype):
    """What is saved may come back rounded: never as memory of another size."""
    query, key, value = inputs()
    want = torch.autograd.grad(
        ch.attention(query, key, value, mask=ch.Causal(), engine=engine).square().sum(), (query, key, value)
    )
    change = lambda t: t.to(dtype) if t.is_floating_point() else t
    with saved_tensors_hooks(change, lambda t: t):
        output = ch.attention(query, key, value, mask=ch.Causal(), engine=engine)
    got = torch.autograd.grad(output.square().sum(), (query, key, value))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=0.3 if dtype == torch.bfloat16 else 1e-4, rtol=0.1)


@WRITTEN_OUT
@pytest.mark.parametrize("where", ["query", "key"])
@pytest.mark.parametrize("length", [8, 300])
def test_gradients_of_what_a_row_of_nan_does_not_see(engine, where, length):
    query, key, value = (t.detach() for t in inputs(length, 4))
    (query if where == "query" else key)[0, 0, 1] = torch.nan
    found = []
    for each in (engine, "reference"):
        leaves = [t.clone().requires_grad_() for t in (query, key, value)]
        output = ch.attention(*leaves, mask=ch.SlidingWindow(before=3), engine=each)
        found.append([g.isnan().any(-1) for g in torch.autograd.grad(output.sum(), leaves)])
    for name, got, want in zip(("query", "key", "value"), *found, strict=True):
        if name == where:  # the gradient to what is NaN itself is 0 on the reference, and NaN here
            got[0, 0, 1] = want[0, 0, 1]
        assert torch.equal(got, want)


@WRITTEN_OUT
def test_a_huge_value_behind_a_bias_of_minus_infinity(engine):
    query, key, value = (t.detach() for t in inputs(4, 4))
    value[0, 0, 3] = 3e38
    bias = torch.zeros(4, 4)
    bias[:3, 3] = -torch.inf
    leaf = query.clone().requires_grad_()
    (got,) = torch.autograd.grad(ch.attention(leaf, key, value, mask=bias, engine=engine).sum(), leaf)
    assert got[0, 0].isfinite().all(-1).tolist() == [True, True, True, False]


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5}, {"sinks": True}, {"score": ch.Gaussian()}], ids=str)
def test_backward_on_the_meta_device(options):
    given = [torch.zeros(2, 2, 9, 4, device="meta", requires_grad=True) for _ in range(3)]
    options = options | ({"sinks": torch.zeros(2, device="meta", requires_grad=True)} if "sinks" in options else {})
    output = ch.attention(*given, mask=ch.Causal(), engine="tiled", **options)
    assert [g.shape for g in torch.autograd.grad(output.sum(), given)] == [t.shape for t in given]


@pytest.mark.parametrize("engine", ["native", "tiled", "reference"])
def test_a_masked_weight_is_0_however_it_is_asked_for(engine):
    """In a row of NaN too."""
    query, key = draw(6, 4), draw(6, 4, seed=1)
    key[0] = torch.nan
    w = ch.weights(query, key, mask=ch.Causal(), engine=engine)
    for row in (w[2][3:], w[2, 3:], w.dense()[2, 3:], w[1:4][1, 3:]):
        assert row.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("engine", ["native", "tiled", "reference"])
def test_no_heads_of_keys_that_are_not_finite(engine):
    query, key = draw(1, 2, 5, 4), draw(1, 2, 5, 4, seed=1)
    key[0, 0, 1] = torch.nan
    assert ch.weights(query, key, mask=ch.Causal(), engine=engine)[:, 0:0].shape == (1, 0, 5, 5)


class WithBackward(Engine):
    """An engine of one's own with gradients of its own: those of another, with a mark that they were used."""

    name = "with backward"
    inner = Tiled()

    def __init__(self):
        self.calls = 0

    def objections(self, problem):
        return []

    def cost(self, problem):
        return Cost(1, 0)

    def forward(self, problem, rows=False):
        return self.inner.forward(problem, rows)

    def backward(self, problem, rows, grad, wanted):
        self.calls += 1
        return self.inner.backward(problem, rows, grad, wanted)


def test_an_engine_with_gradients_of_its_own():
    engine, given = WithBackward(), inputs()
    got = torch.autograd.grad(ch.attention(*given, mask=ch.Causal(), engine=engine).sin().sum(), given)
    want = torch.autograd.grad(ch.attention(*given, mask=ch.Causal(), engine="reference").sin().sum(), given)
    assert engine.calls == 1
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_an_engine_whose_forward_leaves_out_the_rows(monkeypatch):
    engine = WithBackward()
    monkeypatch.setattr(engine, "forward", lambda problem, rows=False: Partial(engine.inner.forward(problem).output))
    with pytest.raises(ch.ClearheadError, match="gave no maximum and log_sum"):
        ch.attention(*inputs(), engine=engine)


def test_what_an_engine_of_ones_own_would_leave_out_is_refused():
    engine, given = WithBackward(), inputs()
    attend = lambda *given, **options: ch.attention(*given, engine=engine, **options)
    weight = torch.nn.Parameter(torch.ones(8))
    learnt = lambda query, key: (query * weight) @ key.mT
    with pytest.raises(ch.UnsupportedError, match="it should object to it"):
        attend(*given, score=learnt)
    with pytest.raises(ch.UnsupportedError, match="it should object to it"):
        attend(*given, bias=ch.BiasFunction(lambda batch, head, query, key: weight[0] * (query - key)))
    with pytest.raises(ch.UnsupportedError, match=r"torch\.func and forward mode bypass"):
        torch.func.grad(lambda query: attend(query, *given[1:]).sum())(given[0])
    with torch.no_grad():
        assert attend(*given, score=learnt).shape == given[0].shape


def test_rows_are_the_softmax_of_the_whole():
    """With them a part of the keys has the right gradients: what merging parts stands on."""
    from clearhead.engines.native.engine import Native
    from clearhead.problem.partial import Rows
    from clearhead.problem.problem import make_problem
    from clearhead.problem.region import Region
    from clearhead.problem.regions import cut

    query, key, value = (t.detach() for t in inputs(130))
    problem = make_problem(query, key, value, mask=ch.Causal())
    grad = draw(*value.shape, seed=7)
    want = [t.requires_grad_() for t in (query.clone(), key.clone(), value.clone())]
    torch.autograd.grad(ch.attention(*want, mask=ch.Causal(), engine="reference"), want, grad)
    want = torch.autograd.grad(ch.attention(*want, mask=ch.Causal(), engine="reference"), want, grad)
    wanted = (True,) * 3 + (False,) * 4
    for engine in (Native(), Tiled()):
        whole = engine.forward(problem, rows=True)
        rows = Rows(whole.maximum, whole.log_sum, (grad * whole.output).sum(-1))
        parts = [slice(0, 50), slice(50, 130)]
        found = [engine.backward(cut(problem, Region(keys=part)), rows, grad, wanted) for part in parts]
        got = [found[0][0] + found[1][0], *(torch.cat([f[i] for f in found], 2) for i in (1, 2))]
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask", [None, (torch.arange(16)[:, None] % 3) <= (torch.arange(16) % 3)], ids=["all", "some"])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_dispatch_mode_changes_nothing(dtype, mask, when):
    """A checkpoint that computes again under a mode that counts operations saves the same."""
    found = []
    for counted in (True, False):
        given = [t.detach().to(dtype).requires_grad_() for t in inputs(16)]
        count = lambda at, counted=counted: FlopCounterMode(display=False) if counted and at == when else nullcontext()
        with count("forward"):
            output = checkpoint(ch.attention, *given, mask=mask, use_reentrant=False)
        with count("backward"):
            found.append((output, *torch.autograd.grad(output.sin().sum(), given)))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_a_checkpoint_that_runs_again_by_another_function_is_an_error():
    """In forward mode another function computes the call: its saved tensors are not those of the first run."""
    output = checkpoint(ch.attention, *inputs(16), use_reentrant=False)
    with forward_ad.dual_level(), pytest.raises(CheckpointError):
        output.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [3, 8, 32, 64, 100])
def test_a_plain_call_is_sdpas_to_the_last_bit(dtype, width):
    given = [draw(1, 2, 16, width, seed=seed).to(dtype).requires_grad_() for seed in range(3)]
    found = []
    for attend in (torch.nn.functional.scaled_dot_product_attention, ch.attention):
        output = attend(*given)
        found.append((output, *torch.autograd.grad(output.sin().sum(), given)))
    for want, got in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_sdpa_by_name_is_exported():
    class Plain(torch.nn.Module):
        def forward(self, query, key, value):
            return ch.attention(query, key, value, engine="sdpa")

    given = tuple(t.detach() for t in inputs(16))
    torch.testing.assert_close(torch.export.export(Plain(), given).module()(*given), Plain()(*given))
