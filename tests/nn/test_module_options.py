"""The options of MultiHeadAttention, in random combinations: outputs and gradients are those of plain PyTorch."""

import copy
import math
import pickle
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from clearhead.nn import AdditiveAttention, KeyValueCache, MultiHeadAttention, RotaryEmbedding, RotaryScaling


class Wave(nn.Module):
    """A rotation of one's own, with a parameter: each entry times 1 + a · sin(position)."""

    def __init__(self, width):
        super().__init__()
        self.a = nn.Parameter(torch.linspace(0.1, 0.5, width))

    def forward(self, x, *, positions):
        assert positions.shape == (x.shape[0], x.shape[2])
        return x * (1 + self.a * torch.sin(positions.to(x.dtype))[:, None, :, None])


def halves(x, positions, base=10000.0):
    """RoPE of plain PyTorch, of all entries; positions (B, L)."""
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None].double() * base ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def numbered(x, past):
    return (past + torch.arange(x.shape[1])).expand(x.shape[0], -1)


def formula(module, query, key, value, keep, positions=None, key_positions=None, bias=0.0):
    """Multi-head attention in plain PyTorch; keep (B or 1, 1, Lq, Lk)."""
    width, heads, groups = module.head_dim, module.num_heads, module.num_heads // module.num_kv_heads
    split = lambda x: x.unflatten(-1, (-1, width)).transpose(1, 2)
    q, k, v = split(module.W_q(query)), split(module.W_k(key)), split(module.W_v(value))
    q = q if module.query_norm is None else module.query_norm(q)
    k = k if module.key_norm is None else module.key_norm(k)
    at = numbered(query, 0) if positions is None else positions.expand(query.shape[0], -1)
    key_at = numbered(key, 0) if key_positions is None else key_positions.expand(key.shape[0], -1)
    if isinstance(module.rotary, RotaryEmbedding):
        q, k = halves(q, at), halves(k, key_at)
    elif module.rotary is not None:
        q, k = module.rotary(q, positions=at), module.rotary(k, positions=key_at)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    factor = width**-0.5 if module.scale is None else module.scale
    factor = factor if module.temperature is None else factor / module.temperature
    factor = factor.reshape(-1, 1, 1) if isinstance(factor, torch.Tensor) else factor
    scores = q @ k.mT * factor + bias
    if module.score_bias is not None:
        scores = scores + module.score_bias(q, k, align=keep.shape[-1] - keep.shape[-2])
    scores = scores.masked_fill(~keep, -torch.inf)
    if module.sinks is not None:
        sinks = module.sinks[:, None, None].expand(scores.shape[0], heads, scores.shape[2], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    output = weights @ v
    if module.gate is not None:
        gates = torch.sigmoid(module.W_g(query))
        per = gates.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, H, Lq, width or 1)
        output = output * per
    return module.W_o(output.transpose(1, 2).flatten(2)), weights


class Draw(random.Random):
    def module(self, dtype=torch.float64, **fixed):
        kv, group, width = self.choice([1, 2]), self.choice([1, 2, 3]), self.choice([4, 6])
        heads = kv * group
        number = lambda low, high: torch.empty(self.choice([(), (1,), (heads,), (heads, 1, 1)])).uniform_(low, high)
        factor = lambda low, high: self.choice([None, None, 0.7, nn.Parameter(number(low, high)), number(low, high)])
        norm = lambda: self.choice([None, nn.RMSNorm(width), nn.LayerNorm(width), nn.RMSNorm(width, eps=0.1)])
        torch.manual_seed(self.randrange(10**6))
        options = {
            "num_kv_heads": kv,
            "head_dim": width,
            "bias": self.random() < 0.5,
            "query_norm": norm(),
            "key_norm": norm(),
            "rotary": self.choice([None, RotaryEmbedding(width), Wave(width)]),
            "scale": factor(0.2, 1.0),
            "temperature": factor(0.5, 2.0),
            "sinks": self.random() < 0.5,
            "score_bias": self.choice([None, ch.RelativeBias(heads, num_buckets=8, max_distance=9), ch.ALiBi(heads)]),
            "gate": self.choice([None, "elementwise", "headwise"]),
        }
        module = MultiHeadAttention(5, heads, **options | fixed).to(dtype)
        with torch.no_grad():
            for p in (module.sinks, *(n.weight for n in (module.query_norm, module.key_norm) if n is not None)):
                if p is not None:
                    p.add_(torch.randn_like(p) * 0.3)
        return module.eval()

    def positions(self, *shape):
        return torch.tensor([self.randrange(30) for _ in range(math.prod(shape))]).reshape(shape)


def gradients(output, module, *inputs):
    wanted = [*inputs, *(p for p in module.parameters())]
    return torch.autograd.grad((output * torch.linspace(-1, 1, output.numel()).reshape(output.shape)).sum(), wanted)


def causal(lq, lk):
    return torch.ones(lq, lk, dtype=torch.bool).tril(lk - lq)[None, None]


@pytest.mark.parametrize("seed", range(40))
def test_forward_gradients_and_weights(seed):
    d = Draw(seed)
    module, own = d.module(), d.random() < 0.5
    b, lq = d.choice([1, 2, 3]), d.choice([1, 4])
    lk = lq if own else d.choice([4, 7])
    query = torch.randn(b, lq, 5, dtype=torch.float64, requires_grad=True)
    key = query if own else torch.randn(b, lk, 5, dtype=torch.float64, requires_grad=True)
    at = key_at = None
    if module.rotary is not None and d.random() < 0.6:
        at, key_at = (d.positions(*(d.choice([(n,), (b, n)]))) for n in (lq, lk))
    keywords = {} if at is None else {"positions": at, "key_positions": key_at}
    if at is not None and own and at.shape == key_at.shape and d.random() < 0.5:
        keywords, key_at = {"positions": at}, at
    bias = torch.randn(lq, lk, dtype=torch.float64)
    got = module(query, key, key, ch.Causal(), bias=bias, align="lower_right", **keywords)
    want, weights = formula(module, query, key, key, causal(lq, lk), at, key_at, bias)
    torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-9)
    torch.testing.assert_close(module.attention_weights.dense(), weights.detach(), atol=1e-10, rtol=1e-9)
    inputs = (query,) if own else (query, key)
    for ours, theirs in zip(gradients(got, module, *inputs), gradients(want, module, *inputs), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-8)
    keys = {} if key_at is None else {"positions": key_at}
    prepared = module.prepare(key, key, **keys)
    queries = {} if at is None else {"positions": at}
    again = module(query, prepared, mask=ch.Causal(), bias=bias, align="lower_right", **queries)
    torch.testing.assert_close(again, got, atol=1e-12, rtol=0)
    with torch.no_grad(), ch.watch(module) as seen:
        module(query, key, key, ch.Causal(), bias=bias, align="lower_right", **keywords)
    torch.testing.assert_close(seen[0].weights.dense(), weights.detach(), atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_decoding_is_the_whole_at_once(seed):
    """Prompts of unequal lengths, then token by token; positions that begin anew, or those of the cache."""
    d = Draw(seed)
    module, x = d.module(), torch.randn(2, 9, 5, dtype=torch.float64)
    lens, cache = [4, 2], KeyValueCache()
    own = d.positions(2, 9) if module.rotary is not None and d.random() < 0.5 else None
    given = lambda at: {} if own is None else {"positions": own.gather(1, at)}
    want = formula(module, x, x, x, causal(9, 9), own, own)[0]
    with torch.no_grad():
        every = torch.arange(4).expand(2, -1)
        first = module(x[:, :4], x[:, :4], x[:, :4], ch.Causal(), cache=cache, new_lens=lens, **given(every))
        for row, n in enumerate(lens):
            torch.testing.assert_close(first[row, :n], want[row, :n], atol=1e-10, rtol=1e-9)
        for _ in range(5):
            at = torch.tensor(cache.lengths)[:, None]
            token = x.gather(1, at[..., None].expand(-1, -1, 5))
            got = module(token, token, token, ch.Causal(), cache=cache, **given(at))
            torch.testing.assert_close(got, want.gather(1, at[..., None].expand(-1, -1, 5)), atol=1e-10, rtol=1e-9)


ALL = {
    "num_kv_heads": 2,
    "head_dim": 4,
    "rotary": RotaryEmbedding(4),
    "sinks": True,
    "gate": "elementwise",
}


def everything(dtype=torch.float32, **fixed):
    """A module with every option at once."""
    torch.manual_seed(0)
    options = {
        "query_norm": nn.RMSNorm(4),
        "key_norm": nn.LayerNorm(4),
        "scale": nn.Parameter(torch.rand(4) + 0.5),
        "temperature": nn.Parameter(torch.ones(())),
        "score_bias": ch.RelativeBias(4, 8, 9),
    }
    return MultiHeadAttention(8, 4, **ALL | options | fixed).to(dtype).eval()


PACKED = torch.tensor([0, 1, 2, 0, 1, 2, 3])


def test_packed_documents_are_the_documents_alone():
    module = everything(torch.float64)
    x = torch.randn(1, 7, 8, dtype=torch.float64)
    mask = ch.Causal() & ch.Documents.from_lengths([3, 4])
    packed = module(x, x, x, mask, positions=PACKED)
    alone = [module(part, part, part, ch.Causal()) for part in x.split([3, 4], 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=1e-10, rtol=1e-9)
    whole = module(x, x, x, mask)  # rotary depends on distances alone, so that other beginnings change nothing
    torch.testing.assert_close(packed, whole, atol=1e-10, rtol=1e-9)
    moved = everything(torch.float64, rotary=Wave(4).double())
    assert not torch.allclose(moved(x, x, x, mask, positions=PACKED), moved(x, x, x, mask))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_whole(dynamic):
    module = everything()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (7, 9) if dynamic else (7,):
        x = torch.randn(2, length, 8, requires_grad=True)
        at = torch.arange(length).remainder(5).expand(2, -1)
        got, want = (m(x, x, x, ch.Causal(), positions=at) for m in (compiled, module))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        for a, b in zip(gradients(got, module, x), gradients(want, module, x), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_autocast_checkpoints_copies_and_state_dicts():
    module = everything()
    x = torch.randn(2, 7, 8, requires_grad=True)
    want = module(x, x, x, ch.Causal(), positions=PACKED)
    with torch.autocast("cpu", torch.bfloat16):
        low, cache = module(x, x, x, ch.Causal(), positions=PACKED), KeyValueCache()
        assert low.dtype == torch.bfloat16
        steps = [module(t, t, t, ch.Causal(), cache=cache) for t in x.detach().split(1, 1)]
        whole = module(x, x, x, ch.Causal())
    torch.testing.assert_close(low.float(), want, atol=0.05, rtol=0.05)
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=0.05, rtol=0.05)
    again = checkpoint(lambda t: module(t, t, t, ch.Causal(), positions=PACKED), x, use_reentrant=False)
    for a, b in zip(gradients(again, module, x), gradients(want, module, x), strict=True):
        assert a is not None
        torch.testing.assert_close(a, b)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), everything()):
        other.load_state_dict(module.state_dict())
        torch.testing.assert_close(other(x, x, x, ch.Causal(), positions=PACKED), want)
    assert {"sinks", "scale", "temperature", "W_g.weight", "query_norm.weight", "score_bias.weight"} <= {
        *module.state_dict()
    }
    plain = MultiHeadAttention(8, 4)
    assert {*plain.state_dict()} == {f"W_{n}.{p}" for n in "qkvo" for p in ("weight", "bias")}


def test_a_buffer_is_kept_and_moves():
    module = MultiHeadAttention(8, 2, scale=torch.tensor([0.5, 2.0]), temperature=torch.tensor(2.0))
    assert {"scale", "temperature"} <= {*module.state_dict()} and module.double().scale.dtype == torch.float64


def test_device_and_dtype():
    made = {"device": "meta", "dtype": torch.bfloat16}
    modules = [
        MultiHeadAttention(8, 2, sinks=True, gate="headwise", **made),
        AdditiveAttention(3, query_dim=8, key_dim=4, **made),
        ch.nn.LearnedPositionalEncoding(9, 8, **made),
    ]
    for module in modules:
        assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}
    x = torch.empty(2, 5, 8, **made)
    assert modules[0](x, x, x, ch.Causal()).shape == x.shape
    lazy = AdditiveAttention(3, query_dim=8, dtype=torch.float64)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    assert lazy(x, x[..., :2], x).dtype == torch.float64
    assert {p.dtype for p in lazy.parameters()} == {torch.float64}
    with torch.device("meta"):
        assert MultiHeadAttention(8, 2, sinks=True).sinks.device.type == "meta"


def test_additive_attention_of_known_widths_is_the_lazy_one():
    torch.manual_seed(0)
    known = AdditiveAttention(5, query_dim=3, key_dim=4)
    query, key = torch.randn(2, 6, 3), torch.randn(2, 7, 4)
    lazy = AdditiveAttention(5)
    lazy(query, key, key)
    lazy.load_state_dict(known.state_dict())
    assert torch.equal(known(query, key, key), lazy(query, key, key))
    scores = torch.tanh((query @ known.W_q.weight.T)[:, :, None] + (key @ known.W_k.weight.T)[:, None]) @ known.w_v
    torch.testing.assert_close(known(query, key, key), scores.softmax(-1) @ key, atol=1e-5, rtol=1e-5)
    compiled = torch.compile(AdditiveAttention(5, query_dim=3, key_dim=4), fullgraph=True, backend="aot_eager")
    assert compiled(query, key, key).shape == (2, 6, 4)  # without a first call
    with pytest.raises(ch.ShapeError, match="width 4"):
        known(key, key, key)
    with pytest.raises(ch.ClearheadError, match="query_dim"):
        AdditiveAttention(5, query_dim=0)


def test_every_parameter_has_a_gradient_and_the_text_says_the_options():
    module = everything()
    x = torch.randn(1, 5, 8)
    module(x, x, x, ch.Causal()).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    assert "scale=(4,), temperature=(), sinks=True, gate='elementwise'" in repr(module)
    assert module.to_torch.__doc__
    with pytest.raises(ch.UnsupportedError, match=r"(?s)a scale of its own.*norm of its queries.*sinks.*a gate"):
        module.to_torch()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    module, exact = everything(dtype), everything(torch.float64)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    got = module(*(x.to(dtype),) * 3, ch.Causal())
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact(x, x, x, ch.Causal()), atol=0.05, rtol=0.05)


def test_a_default_dtype_of_float64(monkeypatch):
    torch.set_default_dtype(torch.float64)
    try:
        module, x = everything(torch.float64, scale=torch.rand(4)), torch.randn(2, 6, 8)
        assert module.sinks.dtype == torch.float64
        assert MultiHeadAttention(8, 2, sinks=True, dtype=torch.float32).sinks.dtype == torch.float32
        want = formula(module, x, x, x, causal(6, 6))[0]
        torch.testing.assert_close(module(x, x, x, ch.Causal()), want, atol=1e-10, rtol=1e-9)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_function_may_turn_and_a_norm_may_widen():
    class Wide(nn.Module):
        def forward(self, x):
            return x.double() / x.double().norm(dim=-1, keepdim=True)

    def turn(x, *, positions):
        return x.double() * (1 + positions[:, None, :, None])

    x = torch.randn(1, 4, 8)
    module = MultiHeadAttention(8, 2, rotary=turn, query_norm=Wide(), key_norm=Wide(), scale=0.3).eval()
    got = module(x, x, x, ch.Causal())
    want = formula(copy.deepcopy(module).double(), *(x.double(),) * 3, causal(4, 4))[0]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_dropout_bias_sinks_and_cache_together():
    module = everything(dropout=0.5).train()
    x, cache = torch.randn(2, 6, 8), KeyValueCache()
    torch.manual_seed(1)
    got = module(x, x, x, ch.Causal(), bias=ch.ALiBi(4), cache=cache, new_lens=[6, 3])
    torch.manual_seed(1)
    assert torch.equal(got, module(x, x, x, ch.Causal(), bias=ch.ALiBi(4), cache=KeyValueCache(), new_lens=[6, 3]))
    assert got.isfinite().all() and not torch.equal(got, module.eval()(x, x, x, ch.Causal(), bias=ch.ALiBi(4)))


def scaled(head_dim, kind):
    return {
        "linear": RotaryScaling.linear(4.0),
        "dynamic": RotaryScaling.dynamic(3.0, 16),
        "yarn": RotaryScaling.yarn(8.0, 16),
        "llama3": RotaryScaling.llama3(8.0, 32),
    }[kind]


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_scaled_rotary_in_a_module_by_offset_positions_cache_and_compiled(kind):
    rotary = RotaryEmbedding(8, base=500.0, scaling=scaled(8, kind))
    x = torch.randn(2, 3, 40, 8)
    whole = rotary(x)
    torch.testing.assert_close(rotary(x, positions=torch.arange(40).expand(2, -1)), whole)
    order = torch.randperm(40)
    torch.testing.assert_close(rotary(x[:, :, order], positions=order), whole[:, :, order])
    compiled = torch.compile(lambda t, at: rotary(t, positions=at), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, torch.arange(40)), whole)
    if kind != "dynamic":  # its angles depend on the length of the call
        torch.testing.assert_close(rotary(x[:, :, 7:], 7), whole[:, :, 7:])
    assert kind in repr(rotary)
    assert repr(pickle.loads(pickle.dumps(rotary))) == repr(rotary)


class Narrow(nn.Module):
    def forward(self, x):
        return x[..., :2]


def changed(module, **parts):
    for name, part in parts.items():
        setattr(module, name, part)
    return module


X, R = torch.zeros(2, 5, 8), RotaryEmbedding(4)
AT = torch.arange(5)
WRONG = {
    "a norm that changes the shape": (
        lambda m: m(query_norm=Narrow())(X, X, X),
        r"gave \(2, 2, 5, 2\).*keeps this shape",
    ),
    "a scale of another shape": (lambda m: m(scale=torch.ones(3)), r"scale has shape \(3,\).*one a head, \(2,\)"),
    "a scale of heads that are gone": (
        lambda m: changed(m(scale=torch.ones(2)), scale=torch.ones(3))(X, X, X),
        "hold 3 numbers",
    ),
    "an unknown gate": (lambda m: m(gate="headwize"), 'expected "elementwise"'),
    "a gate of other heads": (lambda m: changed(m(gate="headwise"), W_g=nn.Linear(8, 1))(X, X, X), "for 1 heads"),
    "no bias": (lambda m: m(score_bias=torch.zeros(5, 5)), "expected a Bias"),
    "too few key positions": (
        lambda m: m(rotary=R)(X, X, X, positions=AT, key_positions=AT[:3]),
        r"key_positions has shape \(3,\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name):
    make, said = WRONG[name]
    with pytest.raises(ch.ClearheadError, match=said):
        make(lambda **options: MultiHeadAttention(8, 2, **options))


def test_a_refused_call_leaves_the_cache():
    module, x, cache = everything(), torch.randn(1, 3, 8), KeyValueCache()
    module(x, x, x, cache=cache)
    module.W_g = nn.Linear(8, 3)
    with pytest.raises(ch.ShapeError):
        module(x, x, x, cache=cache)
    assert len(cache) == 3


def test_second_derivatives_and_transforms():
    module = everything(torch.float64, score_bias=None)
    x = torch.randn(1, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: module(t, t, t), x)
    many = torch.randn(3, 2, 5, 8, dtype=torch.float64)
    mapped = torch.func.vmap(lambda t: module(t, t, t, positions=AT))(many)
    torch.testing.assert_close(mapped, torch.stack([module(t, t, t, positions=AT) for t in many]))
