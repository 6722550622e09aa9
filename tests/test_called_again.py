"""User-defined functions that the backward pass calls again."""

import threading

import pytest
import torch
from drawn import draw

import clearhead as ch
from clearhead.problem import regions


class Holder:
    """A caller's object, whose methods read its attribute."""

    def __init__(self, factor=1.0, give=None):
        self.factor, self.give, self.calls = factor, give, 0

    def now(self):
        self.calls += 1
        return self.factor if self.give is None else self.give(self)

    def score(self, query, key):
        return query @ key.mT * self.now()

    def change(self, score, batch, head, i, j):
        return score * self.now()

    def bias(self, batch, head, i, j):
        return -(i - j).abs() * (0.05 * self.now())

    def rule(self, batch, head, i, j):
        return (i - j).abs() < 3 * self.now()


class Distance(ch.extend.Score):
    def __init__(self, holder):
        super().__init__()
        self.holder = holder

    def tile(self, query, key):
        return -(query.unsqueeze(-2) - key.unsqueeze(-3)).square().sum(-1) * self.holder.now()


class Near(ch.extend.Mask):
    """A mask of one's own, whose residual is a function."""

    def __init__(self, holder):
        self.holder = holder

    def lower(self, sizes):
        start = torch.zeros(1, 1, 1, dtype=torch.int64, device=sizes.device)
        i, j = torch.arange(sizes.queries)[:, None], torch.arange(sizes.keys)

        def near(batch, heads, queries, keys):
            return self.holder.rule(0, 0, i[queries], j[keys])

        return ch.extend.Spans(start, start + sizes.keys, near)


OPTIONS = {
    "a function": lambda h: {"score": h.score},
    "tile": lambda h: {"score": Distance(h)},
    "then": lambda h: {"score": ch.Dot().then(h.change)},
    "bias": lambda h: {"bias": ch.BiasFunction(h.bias)},
    "mask": lambda h: {"mask": ch.MaskFunction(h.rule)},
    "masks": lambda h: {"mask": ~ch.Causal() | ch.MaskFunction(h.rule)},
    "own mask": lambda h: {"mask": Near(h)},
}
MASKS = ("mask", "masks", "own mask")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Some blocks in a problem of a few hundred pairs."""
    monkeypatch.setattr(regions, "BUDGET", 2**9)
    monkeypatch.setattr("clearhead.engines.tiled.user_functions.PAIRS", 2**9)
    monkeypatch.setattr(regions, "LOOK", 2**9)


def inputs(dtype=torch.float32, length=30, width=4, scale=1.0, shift=0.0):
    each = (draw(1, 2, length, width, seed=seed, dtype=torch.float64) for seed in range(3))
    return [(x * scale + shift).to(dtype).requires_grad_() for x in each]


def gradients(output, inputs, **options):
    return torch.autograd.grad(output.square().sum(), inputs, **options)


@pytest.mark.parametrize("name", MASKS)
def test_the_map_of_blocks_of_native_is_that_of_the_forward_pass(name):
    holder, given = Holder(), inputs()
    output = ch.attention(*given, **OPTIONS[name](holder), engine="native")
    before = gradients(output, given, retain_graph=True)
    holder.factor = 2.0
    for got, want in zip(gradients(output, given, retain_graph=True), before, strict=True):
        assert torch.equal(got, want)


def test_the_reference_calls_nothing_again():
    for make in OPTIONS.values():
        holder, given = Holder(), inputs()
        output = ch.attention(*given, **make(holder), engine="reference")
        calls, holder.factor = holder.calls, 2.0
        gradients(output, given)
        assert holder.calls == calls


@pytest.mark.parametrize("name", ["a function", "tile", "then", "bias"])
def test_numbers_that_torch_draws_are_drawn_again(name):
    """A checkpoint puts the state of the generator back. With a seed of its own the reference draws one number."""
    drawn = []

    def give(holder):
        drawn.append(torch.rand((), dtype=torch.float32).item())
        return drawn[-1]

    given = inputs(length=40)
    output = ch.attention(*given, **OPTIONS[name](Holder(give=give)), engine="tiled")
    count = len(drawn)
    gradients(output, given)
    assert count > 2 and set(drawn[count:]) <= set(drawn[:count]) and len(drawn) > count


@pytest.mark.parametrize("surroundings", ["autocast", "thread", "func", "compiled", "losses"])
def test_surroundings(surroundings):
    """Where a function is called again under other circumstances, and where none is."""
    x, holder = inputs(), Holder()
    score = ch.Dot().then(holder.change)
    want = gradients(ch.attention(*x, score=score, engine="reference"), x)

    def attend(*given):
        return ch.attention(*given, score=score, engine="tiled")

    if surroundings == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            got = gradients(ch.attention(*x, score=Distance(holder), engine="tiled").float(), x)
            want = gradients(ch.attention(*x, score=Distance(holder), engine="reference").float(), x)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=0.1, atol=0.1)
        return
    if surroundings == "func":
        got = torch.func.grad(lambda *given: attend(*given).square().sum(), argnums=(0, 1, 2))(*x)
    elif surroundings == "compiled":
        got = gradients(torch.compile(attend, backend="aot_eager")(*x), x)
    elif surroundings == "losses":
        output = attend(*x)
        both = torch.stack([2 * output, torch.zeros_like(output)]).detach()
        got = [two[0] for two in torch.autograd.grad(output, x, both, is_grads_batched=True)]
    else:
        output, found = attend(*x), []
        one = threading.Thread(target=lambda: found.append(gradients(output, x)))
        one.start()
        one.join()
        got = found[0]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
