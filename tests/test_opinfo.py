"""PyTorch's own cases of its attention function (OpInfo) through the drop-in."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.testing._internal.common_methods_invocations import op_db

import clearhead as ch

(OP,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")


def samples(dtype, requires_grad=False):
    """The cases without dropout, which each library draws by itself, as inputs, a mask and keywords."""
    torch.manual_seed(0)
    for sample in OP.sample_inputs("cpu", dtype, requires_grad=requires_grad):
        if not sample.kwargs["dropout_p"]:
            yield [sample.input, *sample.args], sample.kwargs


def every(dtype, requires_grad=False):
    found = list(samples(dtype, requires_grad))
    assert len(found) >= 13
    return found


def test_values_and_gradients():
    for inputs, options in every(torch.float64, requires_grad=True):
        got, want = (f(*inputs, **options) for f in (ch.scaled_dot_product_attention, F.scaled_dot_product_attention))
        torch.testing.assert_close(got, want)
        up = torch.randn_like(want)
        for one, other in zip(*(torch.autograd.grad(output, inputs, up) for output in (got, want)), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_in_other_dtypes(dtype):
    """At most twice as far from the result in float64 as PyTorch's own function, beside a rounding of the result."""
    for inputs, options in every(dtype):
        masks = {name: t for name, t in options.items() if isinstance(t, torch.Tensor)}  # float32 in each dtype
        wide = {name: t.double() for name, t in masks.items()}
        truth = F.scaled_dot_product_attention(*(t.double() for t in inputs), **{**options, **wide})
        own = {**options, **{name: t.to(dtype) for name, t in masks.items()}}
        mine, its = (
            (f(*inputs, **own) - truth).abs().amax()
            for f in (ch.scaled_dot_product_attention, F.scaled_dot_product_attention)
        )
        assert mine <= 2 * its + 2 * torch.finfo(dtype).eps * truth.abs().amax(), options


def test_gradcheck_and_gradients_of_gradients():
    for inputs, options in every(torch.float64, requires_grad=True):
        few = [t[..., :2].detach().requires_grad_() for t in inputs]
        call = lambda *leaves, options=options: ch.scaled_dot_product_attention(*leaves, **options)
        assert torch.autograd.gradcheck(call, few, fast_mode=True)
        assert torch.autograd.gradgradcheck(call, few, fast_mode=True)


def test_forward_mode():
    for inputs, options in every(torch.float64):
        tangents = [torch.randn_like(t) for t in inputs]
        with forward_ad.dual_level():
            dual = ch.scaled_dot_product_attention(*map(forward_ad.make_dual, inputs, tangents), **options)
            got = forward_ad.unpack_dual(dual).tangent
        step = 1e-6
        ahead, behind = (
            F.scaled_dot_product_attention(
                *(t + s * step * d for t, d in zip(inputs, tangents, strict=True)), **options
            )
            for s in (1, -1)
        )
        torch.testing.assert_close(got, (ahead - behind) / (2 * step), atol=1e-7, rtol=1e-6)


def test_vmap():
    for inputs, options in every(torch.float64):
        many = [torch.stack([t, t.flip(-1), 2 * t]) for t in inputs]
        mapped = torch.func.vmap(lambda *one, options=options: ch.scaled_dot_product_attention(*one, **options))(*many)
        want = torch.stack([F.scaled_dot_product_attention(*one, **options) for one in zip(*many, strict=True)])
        torch.testing.assert_close(mapped, want)


def test_compile():
    for number, (inputs, options) in enumerate(every(torch.float64)):
        if number % 4:  # each kind of call takes a second
            continue
        compiled = torch.compile(ch.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
        want = F.scaled_dot_product_attention(*inputs, **options)
        torch.testing.assert_close(compiled(*inputs, **options), want)
