"""Keys prepared once: outputs, gradients and weights are those of the keys themselves."""

import copy
import pickle

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.nn import AdditiveAttention, MultiHeadAttention, PreparedKeys, RotaryEmbedding

B, LQ, LK = 2, 4, 7
LENS = [3, 7]


def heads(**options):
    return MultiHeadAttention(12, 4, kdim=6, vdim=10, **options)


def additive():
    attend = AdditiveAttention(8)
    attend(*inputs())
    return attend


def inputs(dtype=torch.float32):
    torch.manual_seed(1)
    return [torch.randn(B, length, width, dtype=dtype) for length, width in ((LQ, 12), (LK, 6), (LK, 10))]


MODULES = {
    "heads": heads,
    "groups": lambda: heads(num_kv_heads=2, head_dim=5),
    "rotary": lambda: heads(rotary=RotaryEmbedding(2)),
    "another score": lambda: heads(score=ch.Bilinear(3, 3)),
    "without bias": lambda: heads(bias=False),
    "additive": additive,
}
CALLS = {
    "plain": {},
    "lengths": {"valid_lens": LENS},
    "a length a query": {"valid_lens": torch.tensor([[1, 2, 3, 4], [7, 6, 5, 0]])},
    "a mask": {"mask": ch.Causal(), "align": "lower_right"},
    "a bool tensor": {"mask": torch.ones(B, LQ, LK).tril(2).bool()},
    "a float tensor": {"mask": torch.linspace(-3, 3, LQ * LK).view(LQ, LK)},
    "both": {"mask": ch.Causal(), "valid_lens": LENS, "align": "lower_right"},
}


@pytest.fixture(params=MODULES)
def attend(request):
    torch.manual_seed(0)
    return MODULES[request.param]()


@pytest.mark.parametrize("call", CALLS)
def test_outputs_and_weights_are_those_of_the_keys(attend, call):
    query, key, value = inputs()
    expected = attend(query, key, value, **CALLS[call])
    weights = attend.attention_weights.dense()
    prepared = attend.prepare(key, value)
    torch.testing.assert_close(attend(query, prepared, **CALLS[call]), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(attend.attention_weights.dense(), weights, atol=1e-6, rtol=1e-5)
    assert isinstance(prepared, PreparedKeys) and len(prepared) == LK


def test_gradients_are_those_of_the_keys(attend):
    found = []
    for once in (False, True):
        tensors = [t.requires_grad_() for t in inputs()]
        attend.zero_grad()
        query, key, value = tensors
        memory = (attend.prepare(key, value),) if once else (key, value)
        # several queries after one another, and one backward pass through all of them
        outputs = [attend(query[:, i : i + 1], *memory, valid_lens=LENS) for i in range(LQ)]
        torch.cat(outputs, 1).square().sum().backward()
        found.append({n: p.grad for n, p in attend.named_parameters()} | dict(enumerate(t.grad for t in tensors)))
    assert found[0].keys() == found[1].keys() and all(g is not None for g in found[1].values())
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", ["heads", "additive"])
def test_gradients_to_the_last_digit(name):
    torch.manual_seed(0)
    attend = MODULES[name]().double()
    tensors = [t.requires_grad_() for t in inputs(torch.float64)]

    def call(query, key, value, *_):
        prepared = attend.prepare(key, value)
        return attend(query, prepared, valid_lens=LENS), attend(query[:, :1], prepared)

    assert torch.autograd.gradcheck(call, (*tensors, *attend.parameters()), fast_mode=True)


def test_the_keys_are_projected_once(attend):
    query, key, value = inputs()
    calls = []
    if isinstance(attend, MultiHeadAttention):
        attend.W_k.register_forward_hook(lambda *_: calls.append(1))
        prepared = attend.prepare(key, value)
        for _ in range(3):
            attend(query, prepared)
        assert len(calls) == 1
    else:
        prepared = attend.prepare(key, value)
        attend(query, prepared)
        assert attend.attention_weights.problem.key.data_ptr() == prepared._key.data_ptr()  # as it was projected


def test_record_gradients():
    for attend in (
        MultiHeadAttention(12, 4, kdim=6, vdim=10, record_gradients=True),
        AdditiveAttention(8, record_gradients=True),
    ):
        query, key, value = inputs()
        attend(query, attend.prepare(key, value))
        attend.attention_weights[...].square().sum().backward()
        assert attend.W_k.weight.grad.abs().sum() > 0 and attend.W_q.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes(attend, mode):
    query, key, value = inputs()
    with mode():
        prepared = attend.prepare(key, value)
        expected = attend(query, key, value, valid_lens=LENS)
        torch.testing.assert_close(attend(query, prepared, valid_lens=LENS), expected, atol=1e-6, rtol=1e-5)
        weights = attend.attention_weights.dense()
    assert weights.shape[-2:] == (LQ, LK)


def test_autocast(attend):
    query, key, value = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        expected = attend(query, key, value, valid_lens=LENS)
        prepared = attend.prepare(key, value)
        found = attend(query, prepared, valid_lens=LENS)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


def test_autocast_on_one_side(attend):
    query, key, value = inputs()
    expected = attend(query, key, value)
    with torch.autocast("cpu", torch.bfloat16):
        prepared = attend.prepare(key, value)
    with pytest.raises(
        ch.ClearheadError, match=r"is torch.float32, and PreparedKeys.* is torch.bfloat16(?s:.)*autocast"
    ):
        attend(query, prepared)
    prepared = attend.prepare(key, value)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(attend(query, prepared).float(), expected, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(attend, dtype):
    attend.to(dtype)
    query, key, value = inputs(dtype)
    found = attend(query, attend.prepare(key, value), valid_lens=LENS)
    assert found.dtype == dtype
    torch.testing.assert_close(found, attend(query, key, value, valid_lens=LENS), atol=0.02, rtol=0.02)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler's own look at tensors with a graph
def test_compiled(attend):
    query, key, value = inputs()
    expected = attend(query, key, value, valid_lens=torch.tensor(LENS))

    def step(query, key, value, lens):
        prepared = attend.prepare(key, value)
        return attend(query, prepared, valid_lens=lens), attend(query[:, :1], prepared)

    found = torch.compile(step, fullgraph=True, backend="aot_eager")(query, key, value, torch.tensor(LENS))
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1], attend(query[:, :1], key, value), atol=1e-5, rtol=1e-5)
    prepared = attend.prepare(key, value)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found = compiled(query, prepared, valid_lens=torch.tensor(LENS))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_without_a_batch_and_one_memory_for_all():
    attend, (query, key, value) = heads(), inputs()
    prepared = attend.prepare(key[0], value[0])
    torch.testing.assert_close(
        attend(query[0], prepared, valid_lens=[3]), attend(query[0], key[0], value[0], valid_lens=[3])
    )
    prepared = attend.prepare(key[:1], value[:1])
    torch.testing.assert_close(attend(query, prepared), attend(query, key[:1], value[:1]))
    with pytest.raises(ch.ShapeError, match=r"query has shape \(4, 12\).*(?s:.)*the batch must be the same"):
        attend(query[0], prepared)


def test_numpy():
    attend = AdditiveAttention(8)
    arrays = [t.numpy() for t in inputs()]
    expected = attend(*arrays, valid_lens=LENS)
    found = attend(arrays[0], attend.prepare(*arrays[1:]), valid_lens=LENS)
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_sizes_come_with_the_first_keys():
    attend = AdditiveAttention(8)
    query, key, value = inputs()
    prepared = attend.prepare(key, value)
    assert attend(query, prepared).shape == (B, LQ, 10)
    torch.testing.assert_close(attend(query, prepared), attend(query, key, value))
    fresh = AdditiveAttention(8)
    fresh.load_state_dict(attend.state_dict())
    torch.testing.assert_close(fresh(query, fresh.prepare(key, value)), attend(query, key, value))


def test_empty():
    attend, (query, key, value) = heads(), inputs()
    prepared = attend.prepare(key[:, :0], value[:, :0])
    torch.testing.assert_close(attend(query, prepared), attend.W_o.bias.expand(B, LQ, 12))
    prepared = attend.prepare(key[:0], value[:0])
    assert attend(query[:0], prepared).shape == (0, LQ, 12)


Q, K, V = inputs()
WRONG = {
    "a value beside": (lambda a: a(Q, a.prepare(K, V), V), ["a value, (2, 7, 10)", "attend(query, prepared)"]),
    "a mask in its place": (lambda a: a(Q, a.prepare(K, V), ch.Causal()), ["a value, a Causal", "mask="]),
    "of another": (lambda a: a(Q, heads().prepare(K, V)), ["PreparedKeys(key (2, 4, 7, 3)", "another module"]),
    "of other widths": (lambda a: a(Q, MultiHeadAttention(12, 2, kdim=6, vdim=10).prepare(K, V)), ["another module"]),
    "of another kind": (lambda a: a(Q, additive().prepare(K, V)), ["PreparedKeys(key (2, 7, 8)", "another module"]),
    "of a copy": (lambda a: a(Q, copy.deepcopy(a).prepare(K, V)), ["another module"]),
    "no value": (lambda a: a(Q, K), ["value is a NoneType"]),
    "key and value": (lambda a: a.prepare(K, V[:, :3]), ["key and value disagree"]),
    "a width": (lambda a: a.prepare(K[..., :3], V), ["key", "(2, 7, 3)", "6"]),
    "a dtype": (lambda a: a.prepare(K.double(), V.double()), ["float64", "W_k.weight"]),
    "a list": (lambda a: a.prepare([1.0], V), ["key is a list"]),
}


@pytest.mark.parametrize("kind", ["heads", "additive"])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name, kind):
    call, says = WRONG[name]
    with pytest.raises(ch.ClearheadError) as caught:
        call(MODULES[kind]())
    assert all(word in str(caught.value) for word in says), caught.value


def test_pickle():
    attend = heads()
    prepared, same = attend.prepare(K, V), pickle.dumps
    assert len(same(prepared)) < 4000  # without the module
    with pytest.raises(ch.ClearheadError, match="another module"):
        copy.deepcopy(attend)(Q, prepared)
