"""The drop-in for torch's scaled_dot_product_attention: against torch itself."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import clearhead as ch

KEEP = torch.rand(6, 9, generator=torch.Generator().manual_seed(0)) > 0.4
FLOAT = torch.randn(6, 9, generator=torch.Generator().manual_seed(1))
CASES = {
    "plain": ((2, 4, 6, 8), (2, 4, 9, 8), (2, 4, 9, 5), {}),
    "two dimensions": ((6, 8), (9, 8), (9, 8), {}),
    "three dimensions": ((3, 6, 8), (3, 9, 8), (3, 9, 8), {"attn_mask": KEEP.expand(3, 6, 9)}),
    "five dimensions": ((2, 3, 4, 6, 8), (2, 3, 4, 9, 8), (2, 3, 4, 9, 8), {"is_causal": True}),
    "causal, more keys": ((2, 4, 6, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"is_causal": True}),
    "causal, more queries": ((2, 4, 9, 8), (2, 4, 6, 8), (2, 4, 6, 8), {"is_causal": True}),
    "scale": ((2, 4, 6, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"scale": 0.7}),
    "bool": ((2, 4, 6, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"attn_mask": KEEP}),
    "a row of nothing": (
        (2, 4, 6, 8),
        (2, 4, 9, 8),
        (2, 4, 9, 8),
        {"attn_mask": KEEP & (torch.arange(6) != 2)[:, None]},
    ),
    "float": ((2, 4, 6, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"attn_mask": FLOAT}),
    "minus infinity": ((2, 4, 6, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"attn_mask": FLOAT.masked_fill(~KEEP, -torch.inf)}),
    "a mask a head": ((2, 4, 6, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"attn_mask": torch.stack([KEEP] * 3 + [~KEEP])}),
    "a mask a sequence": ((2, 4, 6, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"attn_mask": torch.stack([KEEP, ~KEEP])[:, None]}),
    "query of three dimensions": ((4, 6, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"is_causal": True}),
    "keys of three dimensions": ((2, 4, 6, 8), (4, 9, 8), (4, 9, 8), {"attn_mask": KEEP}),
    "value of three dimensions": ((2, 4, 6, 8), (2, 4, 9, 8), (4, 9, 5), {}),
    "query of two dimensions": ((6, 8), (4, 9, 8), (4, 9, 8), {"attn_mask": FLOAT}),
    "two beside five": ((2, 3, 4, 6, 8), (9, 8), (9, 8), {}),
    "grouped, three dimensions": ((4, 6, 8), (2, 9, 8), (2, 9, 8), {"enable_gqa": True}),
    "grouped, three beside four": ((4, 6, 8), (3, 2, 9, 8), (3, 2, 9, 8), {"enable_gqa": True, "attn_mask": KEEP}),
    "grouped": ((2, 4, 6, 8), (2, 2, 9, 8), (2, 2, 9, 8), {"enable_gqa": True, "attn_mask": KEEP}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_it_is_torchs(name, dtype):
    *shapes, options = CASES[name]
    inputs = [torch.randn(*s, generator=torch.Generator().manual_seed(i)).to(dtype) for i, s in enumerate(shapes)]
    leaves = [t.requires_grad_() for t in inputs]
    if dtype == torch.float64 and "attn_mask" in options and options["attn_mask"].is_floating_point():
        options = {**options, "attn_mask": options["attn_mask"].double()}
    got, want = (f(*leaves, **options) for f in (ch.scaled_dot_product_attention, F.scaled_dot_product_attention))
    assert got.dtype == want.dtype and got.shape == want.shape
    atol = 2e-2 if dtype == torch.bfloat16 else 2e-6  # torch's own error in bfloat16 is of this size
    torch.testing.assert_close(got, want, atol=atol, rtol=atol)
    if dtype != torch.bfloat16:
        grads = [torch.autograd.grad(o.sin().sum(), leaves) for o in (got, want)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, atol=atol, rtol=atol)


def test_the_signature_is_torchs():
    names = list(inspect.signature(ch.scaled_dot_product_attention).parameters)
    described = F.scaled_dot_product_attention.__doc__.split("scaled_dot_product_attention(")[1].split(")")[0]
    assert names == [part.split("=")[0].strip() for part in described.replace("*,", "").split(",") if part.strip()]


def test_dropout_keeps_the_mean():
    x = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    many = ch.scaled_dot_product_attention(*[x.repeat(2000, 1, 1, 1)] * 3, dropout_p=0.2)
    torch.testing.assert_close(
        many.unflatten(0, (2000, 2)).mean(0), F.scaled_dot_product_attention(x, x, x), atol=0.1, rtol=0
    )


def test_its_errors_are_also_those_of_torch():
    x = torch.rand(2, 4, 6, 8)
    for error in (ValueError, RuntimeError):
        with pytest.raises(error):
            ch.scaled_dot_product_attention(x, x[..., :5], x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("causal", [False, True])
def test_nested_tensors(causal):
    rows = [torch.randn(length, 2, 8) for length in (3, 7, 5)]
    for layout in (torch.jagged, torch.strided):
        x = torch.nested.nested_tensor(rows, layout=layout).transpose(1, 2)
        got, want = (
            ch.scaled_dot_product_attention(x, x, x, is_causal=causal),
            [F.scaled_dot_product_attention(*[row.transpose(0, 1)] * 3, is_causal=causal) for row in rows],
        )
        for one, other in zip(got.unbind(), want, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
def test_causal_masks_of_torch(bias):
    query, key, value = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    got, want = (
        f(query, key, value, attn_mask=bias(3, 5))
        for f in (ch.scaled_dot_product_attention, F.scaled_dot_product_attention)
    )
    torch.testing.assert_close(got, want)
    for call in (
        lambda mask: ch.attention(query, key, value, mask=mask),
        lambda mask: ch.attention(query, key, value, bias=mask),
        ch.DenseMask,
        ch.DenseBias,
    ):
        with pytest.raises(ch.ClearheadError, match=r"pass mask=Causal\(\), align="):
            call(bias(3, 5))


def test_a_bool_mask_that_differs_by_sample_under_vmap():
    query, key, value = torch.randn(3, 2, 5, 8).unbind()
    masks = (torch.rand(3, 5, 5) > 0.4) | torch.eye(5, dtype=torch.bool)
    masks[1, 2] = False
    got = torch.func.vmap(lambda mask: ch.scaled_dot_product_attention(query, key, value, mask))(masks)
    want = torch.stack([ch.scaled_dot_product_attention(query, key, value, mask) for mask in masks])
    torch.testing.assert_close(got, want)


def test_it_can_take_the_place_of_torchs_own_function(monkeypatch):
    x, tokens = torch.randn(2, 4, 64, 16), torch.randn(2, 10, 64)
    layer = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    calls = {
        "plain": lambda: F.scaled_dot_product_attention(x, x, x),
        "causal": lambda: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        "one query": lambda: F.scaled_dot_product_attention(x[:, :, :1], x, x),
        "attention": lambda: ch.attention(x, x, x),
        "a module of torch": lambda: layer(tokens, tokens, tokens, need_weights=False)[0],
    }
    want = {name: call().detach() for name, call in calls.items()}
    monkeypatch.setattr(F, "scaled_dot_product_attention", ch.scaled_dot_product_attention)
    for name, call in calls.items():
        torch.testing.assert_close(call().detach(), want[name])
