"""Decoding of sequences of unequal lengths under PyTorch's transforms: as by two whole calls, or refused in words."""

import pytest
import torch

import clearhead as ch
from clearhead import nn


def both():
    """Two steps with a cache, whose first keeps 3 and 2 positions; and the same by one call of each sequence."""
    torch.manual_seed(0)
    layer = nn.MultiHeadAttention(6, 2).double().requires_grad_(False)

    def module(x, **given):
        return layer(x, x, x, **given)

    def cached(x):
        cache = nn.KeyValueCache()
        first = module(x[:, :3], mask=ch.Causal(), cache=cache, new_lens=[3, 2])
        second = module(x[:, 3:], mask=ch.Causal(), cache=cache)
        return (first[0] ** 2).sum() + (first[1, :2] ** 2).sum() + (second**2).sum()

    def whole(x):
        one = module(x[:1], mask=ch.Causal())
        two = module(torch.cat([x[1:, :2], x[1:, 3:]], 1), mask=ch.Causal())
        return (one**2).sum() + (two**2).sum()

    return cached, whole, torch.randn(2, 5, 6, dtype=torch.float64)


def hessian(outer):
    options = {"vectorize": True, "outer_jacobian_strategy": outer}
    return lambda f, x: torch.autograd.functional.hessian(f, x, **options)


DERIVATIVES = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "forward over reverse, batched": hessian("forward-mode"),
    "reverse over reverse, batched": hessian("reverse-mode"),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_are_those_of_whole_calls(name):
    cached, whole, x = both()
    expected = DERIVATIVES[name](whole, x)
    torch.testing.assert_close(DERIVATIVES[name](cached, x), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("lens", [None, [3, 3]], ids=str)
def test_transforms_follow_the_keys_where_gradients_are_off(lens):
    layer, x = nn.MultiHeadAttention(6, 2).double(), torch.randn(4, 2, 5, 6, dtype=torch.float64)

    def cached(x):
        cache = nn.KeyValueCache()
        first = layer(x[:, :3], x[:, :3], x[:, :3], ch.Causal(), cache=cache, new_lens=lens)
        return torch.cat([first, layer(x[:, 3:], x[:, 3:], x[:, 3:], ch.Causal(), cache=cache)], 1)

    def tangents(f):
        with torch.autograd.forward_ad.dual_level():
            return torch.autograd.forward_ad.unpack_dual(f(torch.autograd.forward_ad.make_dual(x[0], x[1]))).tangent

    def whole(x):
        q, k, v = (w(x).unflatten(-1, (2, 3)).transpose(-3, -2) for w in (layer.W_q, layer.W_k, layer.W_v))
        scores = (q @ k.mT / 3**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        return layer.W_o((scores.softmax(-1) @ v).transpose(-3, -2).flatten(-2))

    with torch.no_grad():
        torch.testing.assert_close(tangents(cached), tangents(whole))
        expected = torch.func.jvp(whole, (x[0],), (x[1],))[1]
        torch.testing.assert_close(torch.func.jvp(cached, (x[0],), (x[1],))[1], expected)
        torch.testing.assert_close(torch.func.vmap(cached)(x), whole(x))


def test_values_are_those_of_whole_calls():
    cached, whole, x = both()
    torch.testing.assert_close(cached(x), whole(x))
    torch.testing.assert_close(torch.func.jvp(cached, (x,), (x,))[0], whole(x))


def test_what_is_traced_is_refused_in_words():
    cached, _, x = both()
    with pytest.raises(ch.UnsupportedError, match="new_lens is read on the host"):
        torch.func.linearize(cached, x)
