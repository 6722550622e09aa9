"""DotProductAttention and AdditiveAttention: against the formula, lengths, lazy sizes, learning."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.nn.parameter import UninitializedParameter

import clearhead as ch
from clearhead.nn import AdditiveAttention, DotProductAttention

torch.manual_seed(0)
QUERY, KEY, VALUE = torch.randn(3, 5, 6), torch.randn(3, 7, 6), torch.randn(3, 7, 4)


def formula(scores, value, keep=None):
    """Softmax over the allowed keys, 0 where there is none."""
    if keep is not None:
        scores = scores.masked_fill(~keep, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ value


def additive_scores(attend, query, key):
    features = torch.tanh((query @ attend.W_q.weight.T).unsqueeze(2) + (key @ attend.W_k.weight.T).unsqueeze(1))
    return (features * attend.w_v).sum(-1)


def scores_of(attend, query, key):
    if isinstance(attend, AdditiveAttention):
        return additive_scores(attend, query, key)
    return query @ key.mT / query.shape[-1] ** 0.5


@pytest.fixture(params=[DotProductAttention, lambda: AdditiveAttention(8)], ids=["dot", "additive"])
def attend(request):
    torch.manual_seed(1)
    return request.param()


PER_SEQUENCE = torch.arange(7) < torch.tensor([2, 0, 7])[:, None, None]
PER_QUERY = torch.arange(7) < torch.arange(15).reshape(3, 5).clamp(max=7)[:, :, None]
MASKS = {
    "none": ({}, None),
    "a list": ({"valid_lens": [2, 0, 7]}, PER_SEQUENCE),
    "an array": ({"valid_lens": np.array([2, 0, 7], dtype=np.int32)}, PER_SEQUENCE),
    "a tensor": ({"valid_lens": torch.tensor([2, 0, 7])}, PER_SEQUENCE),
    "one length a query": ({"valid_lens": torch.arange(15).reshape(3, 5).clamp(max=7)}, PER_QUERY),
    "a mask": (
        {"mask": ch.Lengths([2, 0, 7]) & ch.Causal()},
        PER_SEQUENCE & torch.ones(5, 7).tril(2).bool(),
    ),
    "a bool tensor": ({"mask": PER_QUERY}, PER_QUERY),
    "a bool array": ({"mask": PER_QUERY.numpy()}, PER_QUERY),
    "a mask and lengths": (
        {"mask": ch.Causal(), "valid_lens": [2, 0, 7]},
        PER_SEQUENCE & torch.ones(5, 7).tril(2).bool(),
    ),
    "a bool tensor and lengths": ({"mask": PER_QUERY, "valid_lens": [2, 0, 7]}, PER_SEQUENCE & PER_QUERY),
}


@pytest.mark.parametrize("name", MASKS)
def test_output_and_weights_are_the_formula(attend, name):
    given, keep = MASKS[name]
    output = attend(QUERY, KEY, VALUE, **given, align="lower_right")
    scores = scores_of(attend, QUERY, KEY)
    torch.testing.assert_close(output, formula(scores, VALUE, keep), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        attend.attention_weights.dense(), formula(scores, torch.eye(7), keep), atol=1e-5, rtol=1e-5
    )
    if keep is not None and "valid_lens" in given and name != "one length a query":
        assert (output[1] == 0).all()  # no valid key


def test_gradients(attend):
    query, key, value = (t[:2, :3].double().requires_grad_() for t in (QUERY, KEY, VALUE))
    attend.double()
    attend(query, key, value)
    parameters = list(attend.parameters())
    call = lambda query, key, value, *_: attend(query, key, value, [2, 3])
    assert torch.autograd.gradcheck(call, (query, key, value, *parameters), fast_mode=True)


def test_padding_may_hold_anything(attend):
    key, value = KEY.clone(), VALUE.clone()
    attend(QUERY, KEY, VALUE)
    key[0, 2:], value[0, 2:] = torch.nan, torch.inf
    for parameter in attend.parameters():
        parameter.grad = None
    output = attend(QUERY, key, value, [2, 3, 7])
    torch.testing.assert_close(output, attend(QUERY, KEY, VALUE, [2, 3, 7]))
    if isinstance(attend, AdditiveAttention):
        output.sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in attend.parameters())
        assert attend.W_k.weight.grad.abs().sum() > 0


def test_heads_and_numpy():
    attend = DotProductAttention()
    query, key = torch.randn(2, 4, 5, 6), torch.randn(2, 2, 7, 6)
    keep = torch.arange(7) < torch.tensor([3, 7]).reshape(2, 1, 1, 1)
    expected = formula(query @ key.repeat_interleave(2, 1).mT / 6**0.5, key.repeat_interleave(2, 1), keep)
    torch.testing.assert_close(attend(query, key, key, [3, 7]), expected, atol=1e-5, rtol=1e-5)
    output = attend(query.numpy(), key.numpy(), key.numpy(), [3, 7])
    assert isinstance(output, np.ndarray) and isinstance(attend.attention_weights[0, 0, 0], np.ndarray)
    np.testing.assert_allclose(output, expected.numpy(), atol=1e-5)


def test_sizes_come_with_the_first_call():
    attend = AdditiveAttention(8)
    optimizer = torch.optim.SGD(attend.parameters(), lr=1.0)  # before the sizes are known
    assert isinstance(attend.W_q.weight, UninitializedParameter)
    attend(torch.randn(2, 3, 5), torch.randn(2, 4, 9), torch.randn(2, 4, 1)).square().sum().backward()
    assert {name: tuple(p.shape) for name, p in attend.named_parameters()} == {
        "w_v": (8,),
        "W_q.weight": (8, 5),
        "W_k.weight": (8, 9),
    }
    assert type(attend.W_q) is torch.nn.Linear
    before = [p.detach().clone() for p in attend.parameters()]
    optimizer.step()
    assert all((p != old).any() for p, old in zip(attend.parameters(), before, strict=True))


def test_the_first_call_in_inference_mode_leaves_parameters_that_train():
    attend = AdditiveAttention(8)
    with torch.no_grad():
        attend(QUERY, KEY, VALUE)
    attend(QUERY, KEY, VALUE).sum().backward()
    assert attend.W_q.weight.grad is not None


def saved(module):
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer)


def test_state_dict_goes_into_a_fresh_module():
    attend = AdditiveAttention(8)
    expected = attend(QUERY, KEY, VALUE)
    assert set(attend.state_dict()) == {"w_v", "W_q.weight", "W_k.weight"}
    fresh = AdditiveAttention(8)
    fresh.load_state_dict(saved(attend), strict=True)
    torch.testing.assert_close(fresh(QUERY, KEY, VALUE), expected, atol=0, rtol=0)
    fresh.load_state_dict(saved(attend), strict=True)  # and into one that has its sizes
    unsettled = AdditiveAttention(8)
    unsettled.load_state_dict(AdditiveAttention(8).state_dict())
    assert unsettled(QUERY, KEY, VALUE).shape == (3, 5, 4)
    with pytest.raises(ch.ShapeError, match="query has width 7"):
        fresh_7 = AdditiveAttention(8)
        fresh_7.load_state_dict(saved(attend))
        fresh_7(torch.randn(3, 5, 7), KEY, VALUE)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_whole_and_apart(attend, how, called):
    if called:
        attend(QUERY, KEY, VALUE)
    other = how(attend)
    with pytest.raises(ch.ClearheadError, match="no call of it was recorded"):
        _ = other.attention_weights
    out = other(QUERY, KEY, VALUE)
    if called:
        torch.testing.assert_close(out, attend(QUERY, KEY, VALUE))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    if called and isinstance(attend, AdditiveAttention):
        assert all(parameter.abs().sum() > 0 for parameter in attend.parameters())
        uniform = other(QUERY, KEY, VALUE)  # the copy computes with its own parameters
        torch.testing.assert_close(uniform, VALUE.mean(1, keepdim=True).expand_as(uniform))


def test_torch_func_sees_the_parameters():
    attend = AdditiveAttention(8)
    attend(QUERY, KEY, VALUE).square().sum().backward()
    expected = {name: p.grad for name, p in attend.named_parameters()}
    parameters, before = {name: p.detach() for name, p in attend.named_parameters()}, attend.attention_weights
    loss = lambda parameters: functional_call(attend, parameters, (QUERY, KEY, VALUE)).square().sum()
    gradients = torch.func.grad(loss)(parameters)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name])
    assert attend.attention_weights is before
