"""What surrounds a call: the caller's defaults, modes, transforms and threads, and what a tensor may be."""

import functools
import gc
import subprocess
import sys
import types
import weakref

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.autograd.forward_ad as forward_ad
from apart import run_each
from drawn import draw
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from clearhead.engines.native import bindings
from clearhead.scores.base import Pairwise

MASKS = {
    "none": None,
    "causal": ch.Causal(),
    "lengths": ch.Lengths([3, 50]),
    "union": ch.SlidingWindow(before=2) | ch.Lengths([4, 9]),
    "rule": ch.MaskFunction(lambda batch, head, query, key: (query - key) % 3 != 1),
    "documents": ch.Causal() & ch.Documents(torch.arange(50) // 7),
}
ENGINES = [None, "native", "sdpa", "tiled", "reference"]
named = pytest.mark.parametrize("name", MASKS)


def inputs(**options):
    return [draw(2, 3, 50, 8, seed=i, **options) for i in range(3)]


def both(engine, query, key, value, **options):
    """The output and the query's gradient, by an engine; nothing where it says why it can't."""
    query = query.detach().requires_grad_()
    try:
        out = ch.attention(query, key, value, engine=engine, **options)
    except ch.UnsupportedError:
        return None
    return out.detach(), torch.autograd.grad(out.sin().sum(), query)[0]


def close(got, want, tolerance=1e-5):
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance, check_dtype=False)


# ------------------------------------------------------------------ defaults, modes


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@named
def test_the_default_dtype_changes_nothing(name, dtype):
    query, key, value = inputs()
    looks = (
        ch.reductions.Entropy(),
        ch.reductions.TopK(3),
        ch.reductions.Received(),
        ch.reductions.Pool(4),
        ch.reductions.Pool(4, "mean"),
        ch.reductions.Output(value),
    )

    def everything():
        weights = ch.weights(query, key, mask=MASKS[name])
        found = [*weights.reduce(*looks), weights.logsumexp(), weights[0, 1, 2:5, 3:9], weights.dense()]
        return [*both(None, query, key, value, mask=MASKS[name]), *(f if torch.is_tensor(f) else f[0] for f in found)]

    want = everything()
    torch.set_default_dtype(dtype)
    try:
        got = everything()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@named
def test_the_default_device_changes_nothing(name):
    query, key, value = inputs()
    value[0, 0, 3] = torch.nan  # what is not finite takes another path
    want = [ch.attention(query, key, value, mask=MASKS[name]), ch.weights(query, key, mask=MASKS[name]).entropy()]
    with torch.device("meta"):
        got = [ch.attention(query, key, value, mask=MASKS[name]), ch.weights(query, key, mask=MASKS[name]).entropy()]
        assert isinstance(repr(MASKS[name]), str)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("engine", ENGINES)
@named
def test_inference_mode_leaves_nothing_behind(name, engine):
    query, key, value = inputs()
    mask = ch.Lengths([7, 41]) if name == "lengths" else MASKS[name]  # not remembered from another test
    with torch.inference_mode():
        try:
            want = ch.attention(query, key, value, mask=mask, engine=engine)
        except ch.UnsupportedError:
            return
    out, gradient = both(engine, query, key, value, mask=mask)
    close(out, want)
    assert gradient.isfinite().all()


@named
def test_shapes_alone(name):
    with FakeTensorMode():
        fake = torch.empty(2, 3, 50, 8)
        assert ch.attention(fake, fake, fake, mask=MASKS[name]).shape == (2, 3, 50, 8)
    meta = torch.empty(2, 3, 50, 8, device="meta")
    assert ch.attention(meta, meta, meta, mask=MASKS[name]).device.type == "meta"


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_what_is_written_down_is_what_is_computed():
    """make_fx follows plain operations; torch.jit.trace, which would see no kernel, is refused."""
    attend = lambda x: ch.attention(x, 2 * x, x, mask=ch.Causal() & ch.Lengths([7, 50]))
    x = inputs()[0]
    for mode in ("real", "fake"):
        close(make_fx(attend, tracing_mode=mode)(x)(x), attend(x))
    plain = lambda x: ch.attention(x, 2 * x, x, engine="tiled")
    close(make_fx(plain, tracing_mode="symbolic")(x)(x), plain(x))
    with pytest.raises(ch.UnsupportedError, match=r"torch\.export"):
        torch.jit.trace(attend, x, check_trace=False)


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_modules_in_torch_jit():
    encode = ch.nn.SinusoidalPositionalEncoding(4)
    attend = ch.nn.MultiHeadAttention(4, 1, rotary=ch.nn.RotaryEmbedding(4))
    x = torch.randn(1, 5, 4)
    for module, inputs, who in ((attend, (x, x, x), "RotaryEmbedding"), (encode, (x,), "SinusoidalPositionalEncoding")):
        with pytest.raises(ch.UnsupportedError, match=rf"torch\.jit\.trace cannot follow {who}: .*torch\.export"):
            torch.jit.trace(module, inputs, check_trace=False)


def test_a_mask_without_values_on_inputs_with_values():
    query, key, value = inputs()
    lengths = torch.empty(2, dtype=torch.int64, device="meta")
    keep = torch.empty(50, 50, dtype=torch.bool, device="meta")
    for mask in (ch.Lengths(lengths), ch.DenseMask(keep), ch.PrefixLM(lengths)):
        assert repr(mask)
        with pytest.raises(ch.ClearheadError, match="meta"):
            ch.attention(query, key, value, mask=mask)


# ------------------------------------------------------------------ what a tensor may be


@pytest.mark.parametrize("engine", ENGINES)
@named
def test_a_subclass_that_dispatches_goes_where_no_pointer_is_taken(name, engine):
    plain = inputs()
    wrapped = [TwoTensor(t.clone(), t.clone()) for t in plain]
    want, found = both(engine, *plain, mask=MASKS[name]), both(engine, *wrapped, mask=MASKS[name])
    if found is None:
        assert engine in ("native", "sdpa")
        return
    close(found[0].a, want[0])
    close(found[1].b, want[1])


DISTRIBUTED = """
import torch, clearhead as ch, torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
plain = torch.randn(3, 2, 3, 50, 8)
for placement in (Replicate(), Shard(0), Shard(1)):
    tensors = [distribute_tensor(t, mesh, [placement]).requires_grad_() for t in plain]
    out = ch.attention(*tensors)
    out.sum().backward()
    torch.testing.assert_close(out.full_tensor(), ch.attention(*plain))
    assert tensors[0].grad.full_tensor().isfinite().all()
    try:
        ch.attention(*tensors, mask=ch.Causal())
        raise SystemExit("a mask was taken")
    except ch.UnsupportedError as refusal:
        assert "to_local()" in str(refusal)
    try:
        ch.attention(*tensors, engine="native")
    except ch.UnsupportedError as refusal:
        print("served and refused")
for placement, shape in ((Shard(0), (1, 3, 50, 8)), (Shard(1), (2, 1, 50, 8))):
    tensor = distribute_tensor(torch.randn(shape), mesh, [placement])
    try:
        tensor @ tensor.mT
        want = True
    except RuntimeError:
        want = False
    try:
        ch.attention(tensor, tensor, tensor)
        found = True
    except RuntimeError:
        found = False
    print("as PyTorch" if want == found else (want, found))
dist.destroy_process_group()
"""


def test_distributed_tensors_are_served_or_refused_in_words():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", DISTRIBUTED], capture_output=True, text=True)
    said = done.stdout.splitlines()
    assert said[:5] == ["served and refused"] * 3 + ["as PyTorch"] * 2, (said, done.stderr[-2000:])


@pytest.mark.parametrize("engine", ENGINES)
def test_zeros_without_memory(engine):
    query, key, value = inputs()
    nothing = torch._efficientzerotensor(query.shape)
    zeros = torch.zeros(query.shape)
    for some in (0, 1, 2):
        given = [nothing if i == some else t for i, t in enumerate((query, key, value))]
        real = [zeros if i == some else t for i, t in enumerate((query, key, value))]
        close(both(engine, *given, mask=ch.Causal())[0], both(engine, *real, mask=ch.Causal())[0])
    leaf = query.clone().requires_grad_()
    out = ch.attention(leaf, key, value, mask=ch.Causal(), engine=engine)
    assert (torch.autograd.grad(out, leaf, torch._efficientzerotensor(out.shape))[0] == 0).all()


def test_a_subclass_that_holds_numbers_is_a_tensor():
    class Named(torch.Tensor):
        pass

    plain = inputs()
    out = ch.attention(*(t.as_subclass(Named) for t in plain), mask=ch.Causal(), engine="native")
    assert torch.equal(out.as_subclass(torch.Tensor), ch.attention(*plain, mask=ch.Causal(), engine="native"))


@pytest.mark.parametrize("engine", ["native", "tiled", "reference"])
@pytest.mark.parametrize("length", [5, 40])
def test_gradients_of_overlapping_windows(engine, length):
    """A view whose rows share memory has strides that are no layout to allocate."""
    series = draw(length + 19, seed=3)

    def gradients(by):
        leaf = series.clone().requires_grad_()
        windows = leaf.unfold(-1, 20, 1)[None, None]
        out = ch.attention(windows, windows, windows[..., :7], mask=ch.Causal(), engine=by)
        return torch.autograd.grad(out, [leaf, windows], draw(*out.shape, seed=4))

    for got, want in zip(gradients(engine), gradients("reference"), strict=True):
        close(got, want)


@pytest.mark.parametrize("score", ["Dot", "Cosine", "Gaussian"])
@pytest.mark.parametrize("queries", [1, 2, 4, 5, 60])
def test_width_0(score, queries):
    query, key = torch.zeros(1, 2, queries, 0), torch.zeros(1, 2, 70, 0)
    value = draw(1, 2, 70, 3)
    made = getattr(ch, score)()
    for engine in ENGINES:
        out = both(engine, query, key, value, score=made, mask=ch.Causal(), align="lower_right")
        want = both("reference", query, key, value, score=made, mask=ch.Causal(), align="lower_right")
        assert out is None or torch.allclose(out[0], want[0], atol=1e-6)


# ------------------------------------------------------------------ derivatives

DERIVATIVES = """
torch.manual_seed(0)
query, key, value = torch.randn(3, 1, 2, 6, 4).double()
mask = {mask}
by = lambda engine: lambda q: ch.attention(q, key, value, mask=mask, engine=engine).sin().sum()
for transform in (torch.func.grad, torch.func.jacrev, torch.func.hessian,
                  lambda f: lambda q: torch.func.vjp(f, q)[1](torch.ones(()).double()),
                  lambda f: lambda q: torch.func.jvp(f, (q,), (q.sin(),)),
                  lambda f: lambda q: torch.func.vmap(torch.func.grad(f))(torch.stack([q, 2 * q]))):
    got, want = transform(by(None))(query), transform(by("reference"))(query)
    torch.testing.assert_close(got, want)
print("equal")
"""
IN_DERIVATIVES = [
    "ch.Causal()",
    "ch.Lengths([4])",
    "torch.rand(6, 6) > 0.4",
    "ch.Causal() & ch.MaskFunction(lambda b, h, i, j: i - j < 3)",
    "~ch.SlidingWindow(before=1, after=1)",
]


def test_transforms_in_a_fresh_process():
    """Nothing that an earlier call has left behind helps here."""
    ended = run_each("import torch, clearhead as ch", [DERIVATIVES.format(mask=mask) for mask in IN_DERIVATIVES])
    for mask, one in zip(IN_DERIVATIVES, ended, strict=True):
        assert one.out.strip() == "equal", f"{mask}: {one.errors[-2000:]}"


@named
@pytest.mark.parametrize("engine", ["native", "tiled"])
@pytest.mark.parametrize("score", [ch.Dot(), ch.Additive(8, 8, 5)], ids=["dot", "additive"])
def test_batched_gradients(name, engine, score, monkeypatch):
    monkeypatch.setattr("clearhead.problem.regions.BUDGET", 2000)  # many blocks
    query, key, value = inputs()
    query.requires_grad_(), value.requires_grad_()
    out = ch.attention(query, key, value, mask=MASKS[name], engine=engine, score=score)
    gradients = draw(4, *out.shape, seed=7)
    each = [torch.autograd.grad(out, (query, value), g, retain_graph=True) for g in gradients]
    joined = torch.autograd.grad(out, (query, value), gradients, is_grads_batched=True, retain_graph=True)
    mapped = torch.func.vmap(lambda g: torch.autograd.grad(out, (query, value), g, retain_graph=True))(gradients)
    for i, parts in enumerate(zip(*each, strict=True)):
        want = torch.stack(parts)
        assert torch.equal(joined[i], want) and torch.equal(mapped[i], want)


@named
def test_forward_mode_keeps_the_tangent(name):
    query, key, value = (t.double() for t in inputs())
    step = draw(*query.shape, seed=9).double()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, step)
        out = ch.attention(dual, key, value, mask=MASKS[name])
        tangent = forward_ad.unpack_dual(out).tangent
    run = lambda query: ch.attention(query, key, value, mask=MASKS[name], engine="reference")
    close(tangent, torch.func.jvp(run, (query,), (step,))[1], 1e-10)
    with forward_ad.dual_level(), pytest.raises(ch.UnsupportedError, match="forward mode"):
        ch.attention(forward_ad.make_dual(query.float(), step.float()), key.float(), value.float(), engine="native")


@pytest.mark.parametrize("engine", ["native", "tiled", "sdpa", "reference"])
@pytest.mark.usefixtures("few_to_collect")
@pytest.mark.parametrize("name", ["none", "causal", "rule"])
@pytest.mark.parametrize("score", [None, ch.Additive(8, 8, 4), lambda q, k: q @ k.mT], ids=["dot", "additive", "tile"])
def test_a_checkpoint_frees_the_operands(engine, name, score, monkeypatch):
    monkeypatch.setattr("clearhead.problem.regions.BUDGET", 2000)
    alive = []
    leaf = draw(1, 2, 50, 8).requires_grad_()

    def block(leaf):
        operands = leaf * 1, leaf * 2, leaf * 3
        alive.extend(map(weakref.ref, operands))
        return ch.attention(*operands, mask=MASKS[name], score=score, engine=engine)

    try:
        out = checkpoint(block, leaf, use_reentrant=False)
    except ch.UnsupportedError:
        return
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]
    (got,) = torch.autograd.grad(out.sin().sum(), leaf)
    (want,) = torch.autograd.grad(block(leaf).sin().sum(), leaf)
    close(got, want)


# ------------------------------------------------------------------ what has been written to since


class Holder:
    def __init__(self):
        self.ids = torch.arange(50) // 9

    def rule(self, batch, head, query, key):
        return self.ids[query] == self.ids[key]


class OfClass:
    ids = torch.arange(50) // 9

    @property
    def alias(self):
        return self.ids

    def rule(self, batch, head, query, key):
        return self.alias[query] == self.alias[key]


def a_rule_over(ids):
    return lambda batch, head, query, key: ids[query] == ids[key]


@pytest.mark.parametrize("engine", ["native", "sdpa", "tiled"])
@pytest.mark.parametrize("way", ["closure", "self", "callee", "reads", "class", "list", "inside", "default", "partial"])
def test_a_rule_whose_tensor_has_changed(engine, way, monkeypatch):
    monkeypatch.setattr("clearhead.problem.regions.BUDGET", 2000)
    holder = Holder()
    OfClass.ids = holder.ids
    module = torch.nn.Sequential(torch.nn.Identity())
    module[0].register_buffer("ids", holder.ids)
    inner, listed = types.SimpleNamespace(module=module[0]), [0, [holder.ids]]
    rules = {
        "class": ch.MaskFunction(OfClass().rule),
        "list": ch.MaskFunction(lambda b, h, i, j: listed[1][0][i] == listed[1][0][j]),
        "inside": ch.MaskFunction(lambda b, h, i, j: inner.module.ids[i] == inner.module.ids[j]),
        "default": ch.MaskFunction(lambda b, h, i, j, ids=holder.ids: ids[i] == ids[j]),
        "partial": ch.MaskFunction(functools.partial(lambda ids, b, h, i, j: ids[i] == ids[j], holder.ids)),
        "closure": ch.MaskFunction(a_rule_over(holder.ids)),
        "self": ch.MaskFunction(holder.rule),
        "callee": ch.MaskFunction(lambda *indices: holder.rule(*indices)),
        "reads": ch.MaskFunction(
            eval("lambda b, h, i, j: get()[i] == get()[j]", {"get": lambda: holder.ids}), [holder.ids]
        ),
    }
    query, key, value = inputs()
    query.requires_grad_()
    out = ch.attention(query, key, value, mask=rules[way], engine=engine)
    out.sum().backward()
    out = ch.attention(query, key, value, mask=rules[way], engine=engine)
    holder.ids.add_(torch.arange(50) % 2)
    with pytest.raises(ch.ClearheadError, match="modified in place"):
        out.sum().backward()


def test_what_a_rule_does_not_read_may_change():
    """Attributes whose names are not in its code, and what has no value any more."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.zeros(3))
            self.lin, self.width = torch.nn.Linear(2, 2), 4

    model = Model()
    gone = weakref.proxy(Holder())
    config = types.SimpleNamespace(weight=1)

    def rule(batch, head, query, key):
        if batch is None:
            return gone.ids
        return (query - key).abs() < model.width + model.lin.in_features + config.weight

    query, key, value = inputs()
    query.requires_grad_()
    out = ch.attention(query, key, value, mask=ch.MaskFunction(rule))
    model.table.add_(1)
    model.lin.weight.data.add_(1)
    assert torch.autograd.grad(out.sum(), query)[0].isfinite().all()


def test_a_scores_own_writes_are_no_one_elses(monkeypatch):
    monkeypatch.setattr("clearhead.problem.regions.BUDGET", 2000)

    class Counted(ch.extend.Score):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def tile(self, query, key):
            self.calls += 1
            return query @ key.mT

    query, key, value = inputs()
    out, gradient = both("tiled", query, key, value, score=Counted())
    want = both("reference", query, key, value, score=ch.Dot(scale=1.0))
    close(out, want[0])
    close(gradient, want[1])


@pytest.mark.parametrize("engine", ["native", "tiled", "reference"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_key_that_is_nan_stays_with_those_who_see_it_in_gradients(engine, create_graph, monkeypatch):
    monkeypatch.setattr("clearhead.problem.regions.BUDGET", 2000)
    query, key, value = inputs()
    key[:, :, 49] = torch.nan
    query.requires_grad_()
    out = ch.attention(query, key, value, mask=ch.Causal(), engine=engine)
    (gradient,) = torch.autograd.grad(out[:, :, :49].sum(), query, create_graph=create_graph)
    assert gradient[:, :, :49].isfinite().all()


@pytest.mark.parametrize("engine", ["native", "tiled", "reference"])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("budget", [2000, 2**21])
def test_a_huge_value_that_others_may_see_in_gradients(engine, create_graph, budget, monkeypatch):
    monkeypatch.setattr("clearhead.problem.regions.BUDGET", budget)
    query, key, value = inputs()
    value[:, :, 49] = 3e38
    query.requires_grad_()
    loss = draw(2, 3, 49, 8, seed=8)
    found = []
    for by, dtype in ((engine, torch.float32), ("reference", torch.float64)):
        out = ch.attention(query.to(dtype), key.to(dtype), value.to(dtype), mask=ch.Causal(), engine=by)
        found.append(torch.autograd.grad((out[:, :, :49] * loss).sum(), query, create_graph=create_graph)[0])
    close(*found)


def test_statistics_are_those_of_the_tensors_as_they_are():
    query, key, _ = (t[0, 0] for t in inputs())
    keep = torch.ones(50, 50, dtype=torch.bool)
    weights = ch.weights(query, key, mask=ch.DenseMask(keep))
    assert weights.logsumexp().isfinite().all()
    keep[:, 10:] = False
    close(weights[0, 0:10].sum(), torch.tensor(1.0))
    query.mul_(2)
    close(weights[0, 0:10], weights.dense()[0, 0:10])
    with torch.inference_mode():  # whose tensors do not count their writes
        hidden = query.clone()
        weights = ch.weights(hidden, key)
        assert weights.logsumexp().isfinite().all()
        hidden.mul_(3)
        close(weights[0, 0:10], ch.weights(hidden, key).dense()[0, 0:10])


def test_views_of_numpy_records():
    records = np.zeros((5, 8), dtype=np.dtype([("x", "f4"), ("flag", "i1")]))
    records["x"] = np.arange(40).reshape(5, 8) / 40
    for x in (records["x"], records["x"][::-1]):
        assert np.array_equal(ch.attention(x, x, x), ch.attention(*[np.ascontiguousarray(x)] * 3))


LOOKED_AT = {
    "dot": {},
    "padding": {"mask": ch.Lengths([7, 30])},
    "cosine": {"score": ch.Cosine()},
    "additive": {"score": ch.Additive(8, 8, 4)},
    "bias": {"bias": ch.RelativeBias(3)},
}


@pytest.mark.parametrize("name", LOOKED_AT)
@pytest.mark.parametrize("engine", ["native", "tiled", "reference"])
def test_weights_have_gradients_however_they_were_looked_at_before(name, engine):
    query, key, _ = inputs()
    query.requires_grad_()
    with torch.no_grad():
        weights = ch.weights(query, key, engine=engine, **LOOKED_AT[name])
        assert weights.logsumexp().isfinite().any() and not weights[0, 0, 3].requires_grad
    with torch.inference_mode():
        assert weights[0, 0, 3].isfinite().all()
    weights.entropy()
    for row in (3, 4):  # as many backward passes as wanted
        for look in (lambda: weights[0, 0, row], lambda: weights[0, 0, row, 2:9], lambda: weights.dense()[0, 0, row]):  # noqa: B023
            (gradient,) = torch.autograd.grad(look().square().sum(), query)
            assert gradient[0, 0, row].abs().sum() > 0


def test_weights_of_a_weight_that_is_no_parameter():
    query, key, _ = inputs()
    learnt = torch.ones(8, requires_grad=True)
    score = Lowered(lambda low: low._replace(weight=learnt))
    weights = ch.weights(query, key, score=score)
    for look in (weights[0, 0, 3], weights[0, 0, 3, 2:9], weights.dense()):
        assert look.requires_grad


def test_weights_used_in_a_transform_are_whole_after_it():
    query, key, _ = inputs()
    key[:, :, 49] = torch.nan
    weights = ch.weights(query, key, mask=ch.Causal())
    before = weights[0, 0, 3]
    torch.func.grad(lambda x: (weights[0, 0, 3] * x).sum())(torch.randn(50))
    assert torch.equal(weights[0, 0, 3], before)


def test_parameters_that_were_replaced():
    query, key, _ = inputs()
    score = ch.Bilinear(8, 8).requires_grad_(False)
    weights = ch.weights(query, key, score=score)
    weights.dense()
    score.W = torch.nn.Parameter(torch.eye(8), requires_grad=False)
    close(weights.dense(), ch.weights(query, key, score=score).dense())
    score.W.data = -score.W
    close(weights.dense(), ch.weights(query, key, score=score).dense())


def test_a_tile_that_draws_numbers(monkeypatch):
    monkeypatch.setattr("clearhead.problem.regions.BUDGET", 2000)
    query, key, value = inputs()
    value.requires_grad_()
    out = ch.attention(query, key, value, score=lambda q, k: torch.nn.functional.dropout(q, 0.5) @ k.mT)
    loss = draw(*out.shape, seed=7)
    (gradient,) = torch.autograd.grad(out, value, loss)
    close((out * loss).sum(), (gradient * value).sum(), 1e-3)  # linear in the value


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of PyTorch's way to join them
def test_batched_gradients_inside_vmap():
    query, key, value = inputs()
    query.requires_grad_()
    out = ch.attention(query, key, value, mask=ch.Causal(), engine="native")
    losses = draw(3, 2, *out.shape, seed=6)
    joined = lambda g: torch.autograd.grad(out, query, g, is_grads_batched=True, retain_graph=True)[0]
    want = [[torch.autograd.grad(out, query, g, retain_graph=True)[0] for g in row] for row in losses]
    assert torch.equal(torch.func.vmap(joined)(losses), torch.stack([torch.stack(row) for row in want]))


@pytest.mark.parametrize("name", ["none", "union"])
def test_derivatives_inside_compiled_code(name):
    query, key, value = inputs()
    attend = lambda q: ch.attention(q, key, value, mask=MASKS[name])
    for derivative in (
        lambda q: torch.func.jvp(attend, (q,), (q,))[1],
        lambda q: torch.func.grad(lambda x: attend(x).sin().sum())(q),
    ):
        close(torch.compile(derivative, backend="aot_eager")(query), derivative(query))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, query)
        tangent = forward_ad.unpack_dual(torch.compile(attend, backend="eager")(dual)).tangent
        close(tangent, forward_ad.unpack_dual(attend(dual)).tangent)


def test_numpy_inputs_are_copied_where_the_result_outlives_the_call():
    query, keep = inputs()[0][0, 0].numpy(), np.tril(np.ones((50, 50), dtype=bool))
    weights, mask = ch.weights(query, query, mask=keep), ch.DenseMask(keep)
    before = weights[7, 0:8].copy()
    assert np.isfinite(weights.logsumexp()).all()
    query[:], keep[:] = 0, False
    assert np.array_equal(weights[7, 0:8], before) and mask.dense(query, query).sum() == 50 * 51 / 2


# ------------------------------------------------------------------ parts of a person's own


class Scaled(ch.extend.Score):
    def __init__(self):
        super().__init__()
        self.log = torch.nn.Parameter(torch.tensor(0.3))

    def tile(self, query, key):
        return query @ key.mT * self.log.exp()

    def lower(self, query, key):
        return Pairwise("mul", query, key, scale=self.log.exp())


def with_bandwidth():
    score = ch.Gaussian()
    score.bandwidth = torch.nn.Parameter(torch.tensor(1.7))
    return score


@pytest.mark.parametrize("score", [Scaled(), with_bandwidth()], ids=["scale", "bandwidth"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_scale_that_is_learnt_has_a_gradient(score, engine):
    query, key, value = inputs()
    (parameter,) = score.parameters()
    try:
        out = ch.attention(query, key, value, score=score, engine=engine)
    except ch.UnsupportedError:
        return
    reference = ch.attention(query, key, value, score=score, engine="reference")
    got, want = (torch.autograd.grad(o.sin().sum(), parameter)[0] for o in (out, reference))
    close(got, want, 1e-4)


class Lowered(ch.extend.Score):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def tile(self, query, key):
        return query @ key.mT

    def lower(self, query, key):
        return self.change(Pairwise("mul", query, key))


WRONG = {
    "a softcap of its own": {"score": Lowered(lambda low: low._replace(softcap=2.0))},
    "a short key": {"score": Lowered(lambda low: low._replace(key=low.key[:, :, :20]))},
    "a narrow query": {"score": Lowered(lambda low: low._replace(query=low.query[..., :5]))},
    "another phi": {"score": Lowered(lambda low: low._replace(phi="max"))},
    "a weight too long": {"score": Lowered(lambda low: low._replace(weight=torch.ones(9)))},
    "a key in another dtype": {"score": Lowered(lambda low: low._replace(key=low.key.double()))},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_part_of_the_wrong_size_is_refused(name):
    with pytest.raises(ch.ClearheadError, match=r"lower|gave|spans"):
        ch.attention(*inputs(), **WRONG[name])


# ------------------------------------------------------------------ extremes


@pytest.mark.parametrize("engine", ["native", "tiled", "reference"])
def test_entropy_where_a_later_key_is_far_above_the_others(engine):
    key = torch.zeros(65, 1)
    key[:64], key[64] = torch.linspace(-2, 2, 64)[:, None], 120.0
    assert ch.weights(torch.ones(1, 1), key, engine=engine).entropy().item() < 1e-6
    query, key = draw(1, 1, 256, 64) * 3, draw(1, 1, 256, 64, seed=1) * 3
    want = ch.weights(query.double(), key.double(), score=ch.Dot(scale=1.0), engine="reference").entropy()
    close(ch.weights(query, key, score=ch.Dot(scale=1.0), engine=engine).entropy(), want, 1e-4)


@pytest.mark.parametrize("engine", ["native", "tiled", "reference"])
@pytest.mark.parametrize("k", [65, 129, 200, 300])
def test_many_of_the_largest_under_a_mask(engine, k):
    x = draw(300, 8)
    weights = ch.weights(x, x, mask=ch.Causal(), engine=engine)
    (values, indices), entropy = weights.reduce(ch.reductions.TopK(np.int64(k)), ch.reductions.Entropy())
    dense = ch.weights(x, x, mask=ch.Causal(), engine="reference").dense()
    close(values, dense.topk(k).values)
    close(dense.gather(1, indices), values)
    assert all(len(set(row)) == k for row in indices.tolist())
    close(entropy, -torch.xlogy(dense, dense).sum(-1))


@pytest.mark.parametrize("engine", ["native", "tiled", "reference"])
def test_a_sink_far_above_the_scores(engine):
    x = draw(1, 1, 70, 8)
    weights = ch.weights(x, x, sinks=torch.tensor([200.0]), mask=ch.Causal(), engine=engine)
    assert (weights.logsumexp() == 200).all() and (weights.received() == 0).all()
    assert (weights.reduce(ch.reductions.SinkShare()) == 1).all()
    close(weights.entropy(), ch.weights(x, x, mask=ch.Causal(), engine=engine).entropy())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_score_of_infinity_makes_its_row_nan(engine):
    query, key, value = (t[:1, :1] for t in inputs())
    bias = torch.zeros(50, 50)
    bias[3, 20], bias[7, 5] = torch.inf, torch.inf
    out = ch.attention(query, key, value, mask=ch.Causal(), bias=bias, engine=engine)
    assert out[0, 0].isnan().all(-1).nonzero().flatten().tolist() == [7]  # key 20 is not seen by query 3
    if engine != "sdpa":
        weights = ch.weights(query, key, mask=ch.Causal(), bias=bias, engine=engine)
        for told in (weights.logsumexp(), weights.entropy(), weights.topk(3)[0].sum(-1)):
            assert told[0, 0].isnan().nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("engine", ["native", "tiled", "reference"])
@pytest.mark.parametrize("queries", [2, 60])
def test_sums_of_values_near_the_largest_number(engine, queries):
    query, key, value = draw(1, 1, queries, 8), draw(1, 1, 3000, 8, seed=1), draw(1, 1, 3000, 4, seed=2).abs() * 1e37
    want = ch.attention(query.double(), key.double(), value.double(), engine="reference")
    close(ch.attention(query, key, value, engine=engine) / 1e37, want / 1e37)
    out, _ = ch.weights(query, key, engine=engine).reduce(ch.reductions.Output(value), ch.reductions.Entropy())
    close(out / 1e37, want / 1e37)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_bias_in_float32_beside_inputs_in_low_precision(dtype, engine):
    query, key, value = (t.to(dtype) for t in inputs())
    bias = 1000 + draw(50, 50, seed=5)
    bias[0, 0] = 70000.0
    try:
        out = ch.attention(query, key, value, bias=bias, engine=engine)
    except ch.UnsupportedError as refusal:
        assert engine == "sdpa" and "round the bias" in str(refusal)
        return
    want = ch.attention(query.double(), key.double(), value.double(), bias=bias.double(), engine="reference")
    close(out, want, 0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_negative_scale_is_as_exact_as_a_positive_one(dtype):
    query, key, value = (t.to(dtype) for t in inputs())
    for mask in (None, ch.Lengths([3, 50])):
        negative = ch.attention(query, key, value, score=ch.Dot(scale=-0.3), mask=mask, engine="sdpa")
        assert torch.equal(
            negative, ch.attention(-query, key, value, score=ch.Dot(scale=0.3), mask=mask, engine="sdpa")
        )


@pytest.mark.parametrize("queries", [2, 60])
@pytest.mark.parametrize(("size", "weight"), [(1e-4, 1e4), (1e-4, 1.0), (0.01, 100.0), (0.5, 1e3), (2.0, 1e3)])
def test_additive_scores_keep_their_digits(queries, size, weight):
    query, key = draw(1, 1, queries, 37) * size, draw(1, 1, 130, 37, seed=1) * size
    vector = draw(37, seed=2) * weight
    scores = {}
    for engine, dtype in (("native", torch.float32), ("tiled", torch.float32), ("reference", torch.float64)):
        score = ch.Additive.from_weights(None, None, vector.to(dtype)).requires_grad_(False)
        scores[engine] = ch.weights(query.to(dtype), key.to(dtype), score=score, engine=engine).logsumexp()
    error = {engine: (scores[engine] - scores["reference"]).abs().max() for engine in ("native", "tiled")}
    assert error["native"] <= 3 * error["tiled"] + 1e-6 * scores["reference"].abs().max().clamp(min=1)


def test_the_smallest_steps_of_dropout():
    query, key, value = inputs()
    for p in (1.0, 1 - 2.0**-40, 1 - 2.0**-33):
        with pytest.raises(ch.ClearheadError, match="dropout_p"):
            ch.attention(query, key, value, dropout_p=p)
    assert (ch.attention(query, key, value, dropout_p=1 - 2.0**-32) == 0).all()


def test_every_instruction_set_sees_the_same_borders(monkeypatch):
    """The mended kernels, on each: a sink, a far key, large values, small tanh."""
    for chosen in [bindings.chosen(name) for name in bindings.kernels().available()]:
        monkeypatch.setattr(bindings, "chosen", lambda chosen=chosen: chosen)
        test_a_sink_far_above_the_scores("native")
        test_entropy_where_a_later_key_is_far_above_the_others("native")
        test_sums_of_values_near_the_largest_number("native", 60)
        test_a_score_of_infinity_makes_its_row_nan("native")
        test_additive_scores_keep_their_digits(60, 1e-4, 1e4)
        test_width_0("Gaussian", 2)


# ------------------------------------------------------------------ transforms that cannot be served say so


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch.func has no rule for scatter_
def test_weights_under_vmap():
    query, key, value = inputs()
    attend = lambda q, k, v: ch.attention(q, k, v, dropout_p=0.5)
    with pytest.raises(ch.UnsupportedError, match=r"dropout inside torch\.func\.vmap"):
        torch.func.vmap(attend)(query, key, value)
    for look in (lambda w: w.entropy(), lambda w: w.topk(2), lambda w: w.received(), lambda w: w.pool(4)):
        found = torch.func.vmap(lambda q, k, look=look: look(ch.weights(q, k)))(query, key)
        each = [look(ch.weights(q, k)) for q, k in zip(query, key, strict=True)]
        for got, *expected in zip(*(one if isinstance(one, tuple) else (one,) for one in (found, *each)), strict=True):
            torch.testing.assert_close(got, torch.stack(expected))
    dense = torch.func.vmap(lambda q, k: ch.weights(q, k, mask=ch.Causal()).dense())(query, key)
    close(dense, ch.weights(query, key, mask=ch.Causal()).dense())


def test_a_float_mask_under_autocast():
    query, key, value = inputs()
    mask = draw(50, 50)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ch.attention(query, key, value, mask=mask)
    close(out, ch.attention(query, key, value, mask=mask), 0.05)


@pytest.mark.parametrize(
    ("name", "needs_grad"),
    [("union", False), ("rule", True), ("score", True), ("plain", False), ("union", True)],
)
def test_compiled_code_holds_for_every_length(name, needs_grad):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    mask = {"union": ch.SlidingWindow(before=2) | ch.Lengths([4]), "rule": MASKS["rule"]}.get(name)
    score = (lambda q, k: -(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)) if name == "score" else None
    attend = lambda x: ch.attention(x, x, x, mask=mask, score=score)
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for length in (20, 30, 37, 64, 100, 130, 200, 77, 9):
        x = draw(1, 2, length, 8).requires_grad_(needs_grad)
        close(compiled(x), attend(x))
    assert counter.frame_count <= 2
