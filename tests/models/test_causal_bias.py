"""Tensor subclasses that compute attention themselves, as PyTorch's causal masks do, inside a recording or an edit."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode

import clearhead as ch


class Masked(torch.nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask(query.shape[2], key.shape[2]))


class Shifted(torch.Tensor):
    """A query that adds 1 to its output; it knows PyTorch's function by its name."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return F.scaled_dot_product_attention(*(t.as_subclass(torch.Tensor) for t in args)) + 1
        return super().__torch_function__(func, types, args, kwargs or {})


class OfSubclass(torch.nn.Module):
    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query.as_subclass(Shifted), key, value)


def inputs(heads=2):
    torch.manual_seed(0)
    return [torch.randn(1, heads, n, 4) for n in (3, 5, 5)]


@pytest.mark.parametrize("mask, align", [(causal_lower_right, "lower_right"), (causal_upper_left, "upper_left")])
def test_causal_masks_of_torch(mask, align):
    query, key, value = inputs()
    model = Masked(mask)
    plain = model(query, key, value)
    for _ in range(2):
        with ch.watch(model) as seen:
            assert torch.equal(model(query, key, value), plain)
        want = ch.weights(query, key, mask=ch.Causal(), align=align)[:]
        torch.testing.assert_close(seen[0].weights[...], want)
    with ch.edit(model, ch.edits.ScaleHeads(heads=0, factor=1.0)):
        torch.testing.assert_close(model(query, key, value), plain)
    with ch.edit(model, ch.edits.ScaleHeads(heads=1, factor=0.0)):
        edited = model(query, key, value)
    torch.testing.assert_close(edited[:, 0], plain[:, 0])
    assert not edited[:, 1].any()
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


class Doubling(TorchFunctionMode):
    """Knows PyTorch's function by its name."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is F.scaled_dot_product_attention else result


class InMode(torch.nn.Module):
    def forward(self, query, key, value):
        with Doubling():
            return F.scaled_dot_product_attention(query, key, value)


@pytest.mark.parametrize("around", [False, True])
def test_a_function_mode_that_knows_pytorchs_function_by_name(around):
    query, key, value = inputs()
    model = Masked(lambda *_: None) if around else InMode()
    right = F.scaled_dot_product_attention(query, key, value)
    with Doubling() if around else nullcontext(), ch.watch(model), ch.watch(model) as seen:
        assert torch.equal(model(query, key, value), 2 * right)
        assert F.scaled_dot_product_attention is not torch._C._nn.scaled_dot_product_attention
    assert len(seen.calls) == 1
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


def test_a_subclass_that_knows_pytorchs_function_by_name():
    query, key, value = inputs()
    model = OfSubclass()
    plain = model(query, key, value)
    with ch.watch(model), ch.watch(model):
        assert torch.equal(model(query, key, value), plain)
        assert F.scaled_dot_product_attention is not torch._C._nn.scaled_dot_product_attention
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
