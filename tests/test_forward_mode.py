"""Forward mode: tangents, and gradients beside them, are those of the formula, in blocks."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import clearhead as ch
from clearhead.engines import forward_mode
from clearhead.problem import regions

SCORES = {
    "dot": lambda: None,
    "capped": lambda: ch.Dot(softcap=1.5),
    "bilinear": lambda: ch.Bilinear(4, 4).double(),
    "cosine": lambda: ch.Cosine(),
    "additive": lambda: ch.Additive(4, 4, 3).double(),
    "gaussian": lambda: ch.Gaussian(),
    "tile": lambda: lambda q, k: -(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1).add(1).sqrt(),
}
MASKS = {
    "none": lambda: None,
    "causal": lambda: ch.Causal(),
    "gaps": lambda: ch.Causal() & (ch.SlidingWindow(before=2) | ch.Lengths([2, 0])),
    "rule": lambda: ch.MaskFunction(lambda b, h, q, k: (q + k + h) % 3 != 0),
}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(seed=0):
    return draw(2, 4, 9, 4, seed=seed), draw(2, 2, 9, 4, seed=seed + 1), draw(2, 2, 9, 3, seed=seed + 2)


def close(got, want):
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, two, atol=1e-11, rtol=1e-11)


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(regions, "BUDGET", 600)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("more", [False, True], ids=["alone", "sinks, bias, dropout"])
def test_tangents_and_gradients(score, mask, more):
    torch.manual_seed(5)
    options = {"score": SCORES[score](), "mask": MASKS[mask]()}
    if more:
        options |= {"dropout_p": 0.3}
    bias, sinks = draw(1, 4, 9, 9, seed=9), draw(4, seed=10)
    x, along = inputs(), inputs(20)
    extra, to_extra = ((bias, sinks), (draw(1, 4, 9, 9, seed=11), draw(4, seed=12))) if more else ((), ())

    def attend(engine):
        def run(query, key, value, *others):
            torch.manual_seed(7)
            beside = dict(zip(("bias", "sinks"), others, strict=False))
            return ch.attention(query, key, value, **options, **beside, engine=engine)

        return run

    both = [torch.func.jvp(attend(e), (*x, *extra), (*along, *to_extra)) for e in (None, "reference")]
    close(*both)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(p, t) for p, t in zip(x, along, strict=True)]
        tangent = forward_ad.unpack_dual(attend(None)(*duals, *extra)).tangent
    close([tangent], [torch.func.jvp(attend("reference"), (*x, *extra), (*along, *map(torch.zeros_like, extra)))[1]])
    for detached in (True, False):  # a tangent that is a target, and one that is trained
        found = []
        for engine in (None, "reference"):
            leaves = [t.clone().requires_grad_() for t in (*x, *extra)]
            output, tangent = torch.func.jvp(attend(engine), tuple(leaves), (*along, *to_extra))
            loss = (output * (tangent.detach() if detached else tangent)).sum()
            found.append(torch.autograd.grad(loss, leaves))
        close(*found)


def test_gradcheck_in_forward_mode():
    leaves = [t.requires_grad_() for t in (draw(1, 2, 5, 3), draw(1, 1, 5, 3, seed=1), draw(1, 1, 5, 2, seed=2))]
    run = lambda *x: ch.attention(*x, mask=ch.Causal(), engine="tiled")
    assert torch.autograd.gradcheck(run, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, leaves)


def test_only_what_moves_has_a_tangent():
    query, key, value = inputs()
    to_value = draw(*value.shape, seed=30)
    run = lambda v: ch.attention(query, key, v, mask=ch.Causal())
    close(torch.func.jvp(run, (value,), (to_value,)), (run(value), run(to_value)))


def test_the_other_transforms_go_their_own_way():
    x = inputs()
    run = lambda q: ch.attention(q, x[1], x[2], mask=ch.Causal(), engine="tiled").square().sum()
    want = torch.autograd.functional.hessian(lambda q: ch.attention(q, x[1], x[2], mask=ch.Causal(), engine="reference")
                                             .square().sum(), x[0])  # fmt: skip
    close([torch.func.hessian(run)(x[0])], [want])
    close([torch.func.jacfwd(run)(x[0])], [torch.func.jacrev(run)(x[0])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype):
    x, along = ([t.to(dtype) for t in part] for part in (inputs(), inputs(20)))
    run = lambda *x: ch.attention(*x, mask=ch.Causal())
    wide = torch.func.jvp(run, tuple(t.double() for t in x), tuple(t.double() for t in along))
    for one, two in zip(torch.func.jvp(run, tuple(x), tuple(along)), wide, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), two, atol=2e-2 if dtype is torch.bfloat16 else 1e-5, rtol=2e-2)


def test_a_key_of_nan_that_nobody_sees():
    x, along = inputs(), inputs(20)
    x[1][:, :, 5:] = torch.nan
    run = lambda *x: ch.attention(*x, mask=ch.Lengths([5, 3]))
    assert all(t.isfinite().all() for t in torch.func.jvp(run, x, along))


def test_it_is_this_operation(monkeypatch):
    calls, own = [], forward_mode.Tangent.apply
    monkeypatch.setattr(forward_mode.Tangent, "apply", lambda *given: calls.append(given) or own(*given))
    x, along = inputs(), inputs(20)
    torch.func.jvp(lambda *x: ch.attention(*x, mask=ch.Causal()), x, along)
    assert calls
