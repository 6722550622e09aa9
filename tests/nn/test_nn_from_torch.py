"""torch.nn.MultiheadAttention, there and back: the same outputs, state dicts that load."""

import copy

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.nn import MultiHeadAttention, RotaryEmbedding

E, H = 12, 4
KINDS = {
    "plain": {},
    "without bias": {"bias": False},
    "other widths": {"kdim": 6, "vdim": 10},
    "other widths without bias": {"kdim": 6, "bias": False},
    "the length first": {"batch_first": False},
}


def theirs(kind="plain", **options):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, **{"batch_first": True} | KINDS.get(kind, {}) | options)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "bias" in name:  # torch begins with zeros, which would hide a bias in the wrong place
                parameter.normal_()
    return module


def inputs(module, dtype=torch.float32):
    torch.manual_seed(1)
    return [
        torch.randn(3, length, width, dtype=dtype) for length, width in ((5, E), (7, module.kdim), (7, module.vdim))
    ]


def call(module, query, key, value, **options):
    if not module.batch_first:
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
    output, weights = module(query, key, value, average_attn_weights=False, **options)
    return output if module.batch_first else output.transpose(0, 1), weights


@pytest.mark.parametrize("kind", KINDS)
def test_from_torch_gives_the_same(kind):
    module = theirs(kind)
    ours = MultiHeadAttention.from_torch(module)
    assert (ours.embed_dim, ours.kdim, ours.vdim) == (module.embed_dim, module.kdim, module.vdim)
    query, key, value = inputs(module)
    expected, weights = call(module, query, key, value)
    torch.testing.assert_close(ours(query, key, value), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ours.attention_weights.dense(), weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind):
    module = theirs(kind)
    again = MultiHeadAttention.from_torch(module).to_torch()
    assert again.batch_first
    assert {n: p.shape for n, p in again.named_parameters()} == {n: p.shape for n, p in module.named_parameters()}
    for name, parameter in module.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
    query, key, value = inputs(module)
    torch.testing.assert_close(call(again, query, key, value), call(module, query, key, value))


def test_masks_are_the_other_way_round():
    module = theirs()
    ours = MultiHeadAttention.from_torch(module)
    query, key, value = inputs(module)
    padding = torch.arange(7) >= torch.tensor([3, 7, 1])[:, None]  # True: may not
    expected, _ = call(module, query, key, value, key_padding_mask=padding)
    for mask in (ch.Padding(~padding), ch.Lengths([3, 7, 1]), ~padding[:, None]):
        torch.testing.assert_close(ours(query, key, value, mask), expected, atol=1e-6, rtol=1e-5)
    not_allowed = torch.rand(3 * H, 5, 7) > 0.6
    not_allowed[..., 0] = False
    expected, _ = call(module, query, key, value, attn_mask=not_allowed)
    torch.testing.assert_close(
        ours(query, key, value, ~not_allowed.unflatten(0, (3, H))), expected, atol=1e-6, rtol=1e-5
    )
    added = torch.randn(3 * H, 5, 7)
    expected, _ = call(module, query, key, value, attn_mask=added)
    torch.testing.assert_close(ours(query, key, value, added.unflatten(0, (3, H))), expected, atol=1e-6, rtol=1e-5)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    expected, _ = call(module, query, query, query, attn_mask=causal, is_causal=True)
    for mask in (ch.Causal(), causal):
        torch.testing.assert_close(ours(query, query, query, mask), expected, atol=1e-6, rtol=1e-5)


def test_gradients_are_the_same():
    module = theirs()
    ours = MultiHeadAttention.from_torch(module)
    x = inputs(module)[0]
    module(x, x, x)[0].square().sum().backward()
    ours(x, x, x).square().sum().backward()
    packed = torch.cat([ours.W_q.weight.grad, ours.W_k.weight.grad, ours.W_v.weight.grad])
    torch.testing.assert_close(packed, module.in_proj_weight.grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours.W_o.weight.grad, module.out_proj.weight.grad, atol=1e-5, rtol=1e-4)


def test_what_else_is_carried():
    module = theirs(dropout=0.3).double().eval()
    module.in_proj_weight.requires_grad_(False)
    ours = MultiHeadAttention.from_torch(module)
    assert ours.dropout == 0.3 and not ours.training and ours.W_v.weight.dtype == torch.float64
    assert not ours.W_q.weight.requires_grad and ours.W_q.bias.requires_grad and ours.W_o.weight.requires_grad
    again = ours.to_torch()
    assert again.dropout == 0.3 and not again.training and not again.in_proj_weight.requires_grad
    assert again.in_proj_bias.requires_grad and again.in_proj_bias.dtype == torch.float64
    meta = MultiHeadAttention.from_torch(theirs().to("meta"))
    assert meta.W_q.weight.device.type == "meta"


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_copies_and_no_random_number_is_drawn(kind):
    module = theirs(kind)
    state = torch.get_rng_state()
    ours = MultiHeadAttention.from_torch(module)
    back = ours.to_torch()
    assert torch.equal(torch.get_rng_state(), state)
    for copied, source in ((ours, module), (back, ours)):
        pointers = {p.untyped_storage().data_ptr() for p in source.parameters()}
        assert not pointers & {p.untyped_storage().data_ptr() for p in copied.parameters()}


def frozen():
    module = MultiHeadAttention(E, H)
    module.W_k.weight.requires_grad_(False)
    return module


CANNOT = {
    "another score": (lambda: MultiHeadAttention(E, H, score=ch.Cosine()), ["the score is Cosine"]),
    "another scale": (lambda: MultiHeadAttention(E, H, score=ch.Dot(scale=1.0)), ["Dot(scale=1.0)"]),
    "a softcap": (lambda: MultiHeadAttention(E, H, score=ch.Dot(softcap=1.0)), ["softcap"]),
    "groups": (lambda: MultiHeadAttention(E, H, num_kv_heads=2), ["4 query heads share 2 key heads"]),
    "head_dim": (lambda: MultiHeadAttention(E, H, head_dim=5), ["head_dim is 5", "12 / 4"]),
    "rotary": (lambda: MultiHeadAttention(E, H, rotary=RotaryEmbedding(2)), ["rotary"]),
    "frozen apart": (frozen, ["W_k", "frozen"]),
    "several": (lambda: MultiHeadAttention(E, H, head_dim=5, num_kv_heads=1), ["head_dim", "share"]),
}


@pytest.mark.parametrize("name", CANNOT)
def test_to_torch_says_what_torch_cannot(name):
    module, says = CANNOT[name]
    with pytest.raises(ch.UnsupportedError) as caught:
        module().to_torch()
    assert all(word in str(caught.value) for word in ["nn.MultiheadAttention can't", *says]), caught.value


def test_a_scale_that_is_the_default_is_the_default():
    ours = MultiHeadAttention(E, H, score=ch.Dot(scale=3**-0.5))
    x = torch.randn(2, 5, E)
    torch.testing.assert_close(ours.to_torch()(x, x, x)[0], ours(x, x, x), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_of_torchs_module_loads(kind, assign):
    module = theirs(kind)
    widths = {"bias": module.in_proj_bias is not None, "kdim": module.kdim, "vdim": module.vdim}
    ours = nn.ModuleDict({"attend": MultiHeadAttention(E, H, **widths)})  # under a prefix, in a copy
    ours = copy.deepcopy(ours)
    state = {f"attend.{name}": tensor for name, tensor in module.state_dict().items()}
    names = list(state)
    ours.load_state_dict(state, assign=assign)
    assert list(state) == names  # it is as it was
    expected = MultiHeadAttention.from_torch(module).state_dict()
    for name, tensor in ours["attend"].state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    storages = {tensor.untyped_storage().data_ptr() for tensor in ours.state_dict().values()}
    assert len(storages) == len(ours.state_dict())  # each has memory of its own, as safetensors want it


def test_a_state_dict_that_does_not_fit_says_so():
    with pytest.raises(RuntimeError, match=r"size mismatch for W_k.weight"):
        MultiHeadAttention(E, H, num_kv_heads=2).load_state_dict(theirs().state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*W_q.bias"):
        MultiHeadAttention(E, H).load_state_dict(theirs("without bias").state_dict())
    with pytest.raises(ch.UnsupportedError, match=r"add_bias_kv"):
        MultiHeadAttention(E, H).load_state_dict(theirs(add_bias_kv=True).state_dict())
    ours = MultiHeadAttention(E, H)
    MultiHeadAttention(E, H).load_state_dict(ours.state_dict())  # its own names
    for wrong in (torch.tensor(3.0), torch.zeros(3 * E - 1, E), "weights", None):  # it can't be cut into three
        state = theirs().state_dict() | {"in_proj_weight": wrong}
        with pytest.raises(
            RuntimeError, match=r'Missing key\(s\).*W_k.weight(.|\n)*Unexpected key\(s\).*"in_proj_weight"'
        ):
            MultiHeadAttention(E, H).load_state_dict(state)
