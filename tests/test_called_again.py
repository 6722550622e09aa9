"""A caller's functions that give other numbers in the backward pass than in the forward pass: an error in words, and
no such error where rounding alone differs."""

import threading

import numpy as np
import pytest
import torch
from drawn import draw

import clearhead as ch
from clearhead.engines.tiled import again
from clearhead.engines.tiled.engine import Tiled
from clearhead.nn import KeyValueCache, MultiHeadAttention
from clearhead.problem import regions
from clearhead.problem.partial import Rows, WholeRows
from clearhead.problem.problem import make_problem
from clearhead.problem.region import Region
from clearhead.problem.regions import cut


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
    "a function": (lambda h: {"score": h.score}, "the function score of the score"),
    "tile": (lambda h: {"score": Distance(h)}, "Distance.tile"),
    "then": (lambda h: {"score": ch.Dot().then(h.change)}, "Dot.then(change)"),
    "bias": (lambda h: {"bias": ch.BiasFunction(h.bias)}, "the function bias of the bias"),
    "mask": (lambda h: {"mask": ch.MaskFunction(h.rule)}, "the function rule of the mask"),
    "masks": (lambda h: {"mask": ~ch.Causal() | ch.MaskFunction(h.rule)}, "the function rule of the mask"),
    "own mask": (lambda h: {"mask": Near(h)}, "the function near of the mask"),
}
MASKS = ("mask", "masks", "own mask")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Some blocks in a problem of a few hundred pairs."""
    monkeypatch.setattr(regions, "BUDGET", 2**9)
    monkeypatch.setattr("clearhead.engines.tiled.by_functions.PAIRS", 2**9)
    monkeypatch.setattr(regions, "LOOK", 2**9)


@pytest.fixture
def looks(monkeypatch):
    """How often rows were looked at by themselves."""
    found, tried = [], again._tried
    monkeypatch.setattr(again, "_tried", lambda row: found.append(1) or tried(row))
    return found


def inputs(dtype=torch.float32, length=30, width=4, scale=1.0, shift=0.0):
    each = (draw(1, 2, length, width, seed=seed, dtype=torch.float64) for seed in range(3))
    return [(x * scale + shift).to(dtype).requires_grad_() for x in each]


def gradients(output, inputs, **options):
    return torch.autograd.grad(output.square().sum(), inputs, **options)


def refusal(output, given, **options):
    with pytest.raises(ch.ClearheadError, match="in the backward pass of attention") as error:
        gradients(output, given, **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "engine"), [(n, e) for n in OPTIONS for e in ("tiled", "sdpa") if e == "tiled" or n in MASKS]
)
def test_an_attribute_that_is_bound_anew(name, engine):
    make, named = OPTIONS[name]
    holder, given = Holder(), inputs()
    output = ch.attention(*given, **make(holder), engine=engine)
    before = gradients(output, given, retain_graph=True)
    holder.factor = 2.0
    said = refusal(output, given, retain_graph=True)
    assert named in said and "(self.factor = …)" in said
    holder.factor = 1.0  # as it was
    for got, want in zip(gradients(output, given), before, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["then", "bias", "mask", "masks"])
def test_beside_a_cache(name):
    """There the functions are asked with other query indices, by a module that calls them."""
    make, named = OPTIONS[name]
    holder, x, cache = Holder(), inputs(torch.float64)[0].flatten(0, 1), KeyValueCache()
    parts = make(holder)
    attend = MultiHeadAttention(4, 2, score=parts.get("score"), score_bias=parts.get("bias")).double()
    for new in x.split((10, 20), 1):
        output = attend(new, new, new, parts.get("mask"), cache=cache)
    gradients(output, [x], retain_graph=True)
    holder.factor = 2.0
    said = refusal(output, [x])
    assert said.partition(" gave other")[0] == named.replace("change)", "change after the cache)")


@pytest.mark.parametrize("name", MASKS)
def test_the_map_of_blocks_of_native_is_that_of_the_forward_pass(name):
    holder, given = Holder(), inputs()
    output = ch.attention(*given, **OPTIONS[name][0](holder), engine="native")
    before = gradients(output, given, retain_graph=True)
    holder.factor = 2.0
    for got, want in zip(gradients(output, given, retain_graph=True), before, strict=True):
        assert torch.equal(got, want)
    assert OPTIONS[name][1] in refusal(output, given, create_graph=True)  # plain blocks ask again


def test_the_reference_calls_nothing_again():
    for make, _ in OPTIONS.values():
        holder, given = Holder(), inputs()
        output = ch.attention(*given, **make(holder), engine="reference")
        calls, holder.factor = holder.calls, 2.0
        gradients(output, given)
        assert holder.calls == calls


@pytest.mark.parametrize("name", ["a function", "bias", "mask"])
@pytest.mark.parametrize("give", [lambda h: 1 + 0.1 * h.calls, lambda _: 1 + np.random.rand()], ids=["count", "random"])
def test_a_function_of_its_calls(name, give):
    np.random.seed(0)  # one draw in three gives the same mask as the draw before
    given = inputs()
    output = ch.attention(*given, **OPTIONS[name][0](Holder(give=give)), engine="tiled")
    said = refusal(output, given)
    if name != "mask":  # one row of a mask may be the same by chance
        assert "Called twice with the same arguments, it gives two results" in said


@pytest.mark.parametrize("name", ["a function", "tile", "then", "bias"])
def test_numbers_that_torch_draws_are_drawn_again(name):
    """A checkpoint puts the state of the generator back. With a seed of its own the reference draws one number."""
    drawn = []

    def give(holder):
        drawn.append(torch.rand((), dtype=torch.float32).item())
        return drawn[-1]

    given = inputs(length=40)
    output = ch.attention(*given, **OPTIONS[name][0](Holder(give=give)), engine="tiled")
    count = len(drawn)
    gradients(output, given)
    assert count > 2 and set(drawn[count:]) <= set(drawn[:count]) and len(drawn) > count


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_gradients(name):
    holder, given = Holder(), inputs()
    output = ch.attention(*given, **OPTIONS[name][0](holder), engine="tiled")
    holder.factor = 2.0
    refusal(output, given, create_graph=True, retain_graph=True)
    holder.factor = 1.0
    first = gradients(output, given, create_graph=True)
    holder.factor = 2.0
    refusal(first[0], given, retain_graph=True)


@pytest.mark.parametrize("name", OPTIONS)
def test_statistics(name):
    holder, given = Holder(), inputs()
    found = ch.weights(*given[:2], **OPTIONS[name][0](holder), engine="tiled").reduce(ch.reductions.Entropy())
    gradients(found, given[:2], retain_graph=True)
    holder.factor = 2.0
    refusal(found, given[:2])


def test_sinks_gaps_and_queries_that_see_nothing():
    """The sum that is due is 1 less the sink's share, over all parts of the keys, and 0 for a blind query."""
    x, holder = inputs(), Holder()
    sinks = torch.tensor([0.5, 3.0], requires_grad=True)
    hull = ch.DenseMask(torch.arange(30)[:, None] % 7 != 0) & ~ch.SlidingWindow(before=5)
    for engine in ("tiled", "reference"):
        bias = ch.BiasFunction(holder.bias)
        output = ch.attention(*x, bias=bias, mask=hull, sinks=sinks, dropout_p=0.0, align=0, engine=engine)
        found = gradients(output, [*x, sinks], retain_graph=True)
        if engine == "tiled":
            got, kept = found, output
    for one, other in zip(got, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    holder.factor = 2.0
    refusal(kept, [*x, sinks])


def test_it_names_the_row_and_how_far_off_it_is():
    """Row 17 alone changes, by ln 2 for each score: its weights then sum to 2."""
    holder, x = Holder(0.0), inputs()
    output = ch.attention(*x, bias=ch.BiasFunction(lambda b, h, i, j: (i == 17) * (h == 1) * holder.factor + 0.0 * j))
    holder.factor = np.log(2.0)
    said = refusal(output, x)
    assert "query 17 (sequence 0, head 1)" in said and "off by 1;" in said and "1 of 60" in said


def rough(query, key):
    """Squares written out: between vectors far from 0, the scores are what is left of large numbers."""
    return 2 * query @ key.mT - query.square().sum(-1, keepdim=True) - key.square().sum(-1).unsqueeze(-2)


def hashed(query, key):
    """A hash that blows rounding up, whose fraction jumps."""
    return (torch.sin(query @ key.mT * 12.9898) * 43758.5453) % 1


SCORES = {
    "rough": rough,
    "hashed": hashed,
    "low": lambda query, key: query.bfloat16() @ key.bfloat16().mT,
    "capped": ch.Dot(softcap=3.0).then(
        lambda s, b, h, i, j: torch.where(j > i + 2, -torch.inf, s / (1 + (i - j).abs()))
    ),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", SCORES)
def test_no_false_alarm(name, dtype):
    """Large logits, an offset, numbers that are not finite, dropout, sinks, a bias of −∞, a second derivative."""
    sinks = torch.tensor([0.5, -1.0], dtype=dtype)
    bias = ch.BiasFunction(lambda b, h, i, j: torch.where((i + j) % 7 == 0, -torch.inf, 0.1 * (i - j)))
    mask = ch.MaskFunction(lambda b, h, i, j: (i * j) % 5 < i % 3)  # hides all keys of each third query
    far = 0 if dtype == torch.float16 else 1000
    for scale, shift, odd, more in (
        (1, 0, None, {"bias": bias, "sinks": sinks}),
        (1, far, torch.nan, {"mask": mask, "dropout_p": 0.3}),
        (100, 0, torch.inf, {"bias": bias, "mask": mask}),
        (100, far, None, {}),
    ):
        x = inputs(dtype, 20, scale=scale, shift=shift)
        if odd is not None:
            with torch.no_grad():
                x[0][0, 0, 3], x[1][0, 1, 5] = odd, odd
        output = ch.attention(*x, score=SCORES[name], engine="tiled", **more)
        first = gradients(output.float(), x, create_graph=True)
        gradients(first[0].float(), x, allow_unused=True, retain_graph=True)
        gradients(output.float(), x)


def test_rounding_that_differs_is_no_error(monkeypatch, looks):
    """The forward pass rounds its scores in another way, as other blocks and other threads do: then the sums are off by
    much, and a look at the rows explains them. A change of the factor by a hundredth is still found."""
    holder, x = Holder(), inputs(shift=300.0)

    def score(query, key):
        if torch.is_grad_enabled():  # another order of the same sum
            query, key = query.flip(-1), key.flip(-1)
        return rough(query, key) * holder.factor

    output = ch.attention(*x, score=score, engine="tiled")
    scores = [rough(*x[:2]), rough(*(one.flip(-1) for one in x[:2]))]
    assert (scores[0] - scores[1]).abs().max() > 0.01  # a hundredth of a weight, far above √ε
    gradients(output, x, retain_graph=True)
    assert looks
    holder.factor = 2.0
    refusal(output, x)


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


def test_calls_without_functions_are_not_watched(monkeypatch):
    """Masks, biases and scores of clearhead's own change only by writes, which are counted."""
    monkeypatch.setattr("clearhead.engines.tiled.backward.of_sums", None)
    x = inputs(torch.float64)
    keep = torch.rand(30, 30, dtype=torch.float64) < 0.5
    masks = ch.DenseMask(keep), ~ch.DenseMask(keep) | ch.Causal(), ch.Documents(torch.arange(30) % 4)
    for mask in masks:
        gradients(ch.attention(*x, score=ch.Gaussian(), mask=mask, engine="tiled"), x)


def test_a_part_of_the_keys_is_not_watched():
    """The rows of a whole softmax do not sum to 1 over some of its keys: engines add up their gradients."""
    engine, given = Tiled(), [x.detach() for x in inputs()]
    problem = make_problem(*given, mask=ch.MaskFunction(Holder().rule))
    found, wanted = engine.forward(problem, rows=True), (True,) * 3 + (False,) * 4
    grad = draw(1, 2, 30, 4, seed=7)
    rows = Rows(found.maximum, found.log_sum, (grad * found.output).sum(-1))
    parts = [cut(problem, Region(keys=some)) for some in (slice(0, 12), slice(12, 30))]
    every = [engine.backward(part, rows, grad, wanted) for part in parts]
    whole = engine.backward(problem, WholeRows(*rows), grad, wanted)
    got = (
        every[0].query + every[1].query,
        *(torch.cat(both, 2) for both in zip(*(e[1:3] for e in every), strict=True)),
    )
    for one, other in zip(got, whole[:3], strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(ch.ClearheadError, match="the function rule of the mask"):  # which these rows are not
        engine.backward(parts[0], WholeRows(*rows), grad, wanted)
