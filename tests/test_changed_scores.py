"""Scores that a function of the score and its place changes, `Score.then`, beside the formula in plain PyTorch."""

import copy
import functools
import pickle
import types

import numpy as np
import pytest
import torch
from drawn import draw

import clearhead as ch
from clearhead.problem import regions
from clearhead.scores import ScoreFunction

SLOPES = torch.tensor([0.5, 0.1, 0.02, -0.1])


def lean(score, batch, head, i, j):
    """A bias inside a softcap, by head, and a factor by distance."""
    return 4 * torch.tanh((score - SLOPES[head] * (i - j).abs()) / 4) / (1 + batch + (i - j).abs() / 50)


class Learnt(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = torch.nn.Parameter(torch.tensor([0.1, 0.2, 0.3, 0.4]))

    def forward(self, score, batch, head, i, j):
        return score / (1 + self.rate[head] * (i - j).abs())


def inputs(queries=40, keys=60, key_heads=4, width=8, dtype=torch.float32):
    shapes = ((2, 4, queries, width), (2, key_heads, keys, width), (2, key_heads, keys, width))
    return [draw(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes)]


def places(queries, keys):
    return (
        torch.arange(2).view(2, 1, 1, 1),
        torch.arange(4).view(1, 4, 1, 1),
        torch.arange(queries).view(1, 1, -1, 1),
        torch.arange(keys),
    )


def formula(query, key, change, keep=None, bias=0.0, scale=None, softcap=None):
    """The weights."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = change(scores, *places(query.shape[2], key.shape[2])) + bias
    return (scores if keep is None else scores.masked_fill(~keep, -torch.inf)).softmax(-1)


def same(got, want, rtol=2e-5, atol=2e-6):
    torch.testing.assert_close(got, want.to(got.dtype), rtol=rtol, atol=atol)


@pytest.fixture
def small_blocks(monkeypatch):
    """Some blocks in a problem of a few hundred pairs."""
    monkeypatch.setattr(regions, "BUDGET", 2**10)
    monkeypatch.setattr("clearhead.engines.tiled.user_functions.PAIRS", 2**9)
    monkeypatch.setattr(regions, "LOOK", 2**10)


@pytest.mark.parametrize("engine", ["tiled", "reference"])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_values_and_gradients(engine, key_heads, small_blocks):
    """After scale and softcap, before bias and mask; to the inputs, the bias and what the function learns."""
    query, key, value = inputs(key_heads=key_heads)
    bias, learnt = draw(1, 4, 40, 60, seed=5).requires_grad_(), Learnt()
    score = ch.Dot(scale=0.4, softcap=3.0).then(learnt)
    keep = places(40, 60)[3] <= places(40, 60)[2] + 20
    leaves = [query, key, value, bias, learnt.rate]
    got = ch.attention(query, key, value, score=score, mask=ch.Causal(), bias=bias, align="lower_right", engine=engine)
    weights = formula(query, key, learnt, keep, bias, 0.4, 3.0)
    want = weights @ value.repeat_interleave(4 // key_heads, 1)
    same(got, want)
    grad = draw(*got.shape, seed=9)
    for one, other in zip(torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want, leaves, grad), strict=True):
        same(one, other, atol=2e-5)


def test_second_derivatives(small_blocks):
    query, key, value = inputs(12, 12)
    learnt = Learnt()
    given = [*(t.detach().double().requires_grad_() for t in (query, key, value)), learnt.double().rate]

    def squared(outputs):
        first = torch.autograd.grad(outputs.square().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), given)

    got = ch.attention(*given[:3], score=ch.Dot().then(learnt), engine="tiled")
    for one, other in zip(squared(got), squared(formula(*given[:2], learnt) @ given[2]), strict=True):
        same(one, other, rtol=1e-9, atol=1e-9)


def test_weights_their_parts_and_reductions(small_blocks):
    query, key, _ = (t.detach() for t in inputs())
    want = formula(query, key, lean)
    lazy = ch.weights(query, key, score=ch.Dot().then(lean))
    same(lazy.dense(), want)
    same(lazy[1, 2, 10:30:3, 5:50:2], want[1, 2, 10:30:3, 5:50:2])
    same(lazy[:, 3, 7], want[:, 3, 7])
    entropy, received = lazy.reduce(ch.reductions.Entropy(), ch.reductions.Received())
    same(entropy, -torch.xlogy(want, want).sum(-1), atol=1e-5)
    same(received, want.sum(2), atol=1e-5)


def test_some_of_the_keys():
    """`partial` counts keys from the first of all; the parts merge to the whole."""
    query, key, value = (t.detach() for t in inputs())
    given = {"score": ch.Dot().then(lean)}
    first = ch.partial(query, key[:, :, :25], value[:, :, :25], keys=(0, 60), **given)
    second = ch.partial(query, key[:, :, 25:], value[:, :, 25:], keys=(25, 60), **given)
    same(first.merge(second).finish(), formula(query, key, lean) @ value)


@pytest.mark.parametrize("score", [ch.Cosine(0.5), ch.Gaussian(), ScoreFunction(lambda q, k: q @ k.mT / 3)])
def test_after_any_score(score):
    query, key, value = (t.detach() for t in inputs())
    plain = score(query, key)
    want = lean(plain, *places(40, 60)).softmax(-1) @ value
    same(ch.attention(query, key, value, score=score.then(lean)), want)
    same(score.then(lean)(query, key), lean(plain, *places(40, 60)))
    assert score.changed_by is None


def test_twice_and_named():
    query, key, value = (t.detach() for t in inputs())
    score = ch.Dot(softcap=2.0).then(Learnt()).then(lean)
    assert [name for name, _ in score.named_parameters()] == ["changed_by.one.rate"]
    assert "then=" in repr(score)
    both = lambda s, *at: lean(score.changed_by.one(s, *at), *at)
    same(ch.attention(query, key, value, score=score), (formula(query, key, both, softcap=2.0) @ value).detach())


def test_lower_precision_rounds_once(small_blocks):
    query, key, value = inputs(dtype=torch.bfloat16)
    learnt = Learnt().bfloat16()
    got = ch.attention(query, key, value, score=ch.Dot().then(learnt), engine="tiled")
    wide = copy.deepcopy(learnt).float()
    want = formula(query.float(), key.float(), wide) @ value.float()
    same(got, want, rtol=1e-2, atol=1e-2)
    (grad,) = torch.autograd.grad(got.float().square().sum(), learnt.rate)
    (exact,) = torch.autograd.grad(want.square().sum(), wide.rate)
    same(grad.float(), exact, rtol=5e-2, atol=5e-2)


def test_dropout_and_sinks_are_those_of_the_reference(small_blocks):
    query, key, value = inputs()
    given = {"score": ch.Dot().then(lean), "sinks": draw(4, seed=3), "dropout_p": 0.3}
    found = []
    for engine in ("tiled", "reference"):
        torch.manual_seed(1)
        output = ch.attention(query, key, value, **given, engine=engine)
        found.append((output, *torch.autograd.grad(output.sin().sum(), (query, key, value))))
    for one, other in zip(*found, strict=True):
        same(one, other, atol=1e-5)


def test_a_key_that_is_not_finite_reaches_those_who_see_it():
    query, key, value = (t.detach().clone() for t in inputs(40, 40))
    key[0, 1, 30] = torch.nan
    got = ch.attention(query, key, value, score=ch.Dot().then(lean), mask=ch.Causal())
    assert got[0, 1, 30:].isnan().all() and got[0, 1, :30].isfinite().all() and got[0, 0].isfinite().all()


def test_infinite_results_are_those_of_a_bias():
    query, key, value = (t.detach() for t in inputs(6, 6))
    hide = lambda s, b, h, i, j: torch.where(j > i, -torch.inf, s)
    same(ch.attention(query, key, value, score=ch.Dot().then(hide)), ch.attention(query, key, value, mask=ch.Causal()))
    nothing = ch.attention(query, key, value, score=ch.Dot().then(lambda s, b, h, i, j: s - torch.inf))
    assert (nothing == 0).all()
    high = ch.attention(query, key, value, score=ch.Dot().then(lambda s, b, h, i, j: torch.where(j == 2, torch.inf, s)))
    assert high.isnan().all()
    nan = ch.attention(query, key, value, score=ch.Dot().then(lambda s, b, h, i, j: torch.where(i == 2, torch.nan, s)))
    assert nan[:, :, 2].isnan().all() and nan[:, :, 3].isfinite().all()


# ------------------------------------------------------------------------------------------------ compiled, transformed


def test_compiled_code_and_transforms():
    query, key, value = (t.detach() for t in inputs())
    score = ch.Dot().then(lean)
    want = formula(query, key, lean) @ value
    attend = lambda q, k, v: ch.attention(q, k, v, score=score)
    same(torch.compile(attend, backend="eager", fullgraph=True)(query, key, value), want)
    same(torch.func.vmap(attend)(*(t[None] for t in (query, key, value)))[0], want)
    got = torch.func.grad(lambda q: attend(q, key, value).sin().sum())(query)
    leaf = query.clone().requires_grad_()
    same(got, torch.autograd.grad((formula(leaf, key, lean) @ value).sin().sum(), leaf)[0], atol=1e-5)
    _, along = torch.func.jvp(lambda q: attend(q, key, value), (query,), (key[:, :, :40],))
    same(along, torch.func.jvp(lambda q: formula(q, key, lean) @ value, (query,), (key[:, :, :40],))[1], atol=1e-5)


# ------------------------------------------------------------------------------- around: records, explanations, modules


def test_explained():
    query, key, value = (t.detach() for t in inputs(3, 3))
    text = str(ch.explain(query, key, value, score=ch.Dot(softcap=2.0).then(lean)))
    assert "lean(unchanged[i, j], b, h, i, j)" in text
    steps = {step.name: step.value for step in ch.explain(query, key, value, score=ch.Dot().then(lean)).steps}
    same(steps["weights"], formula(query, key, lean))


def test_a_module_records_it():
    module = ch.nn.MultiHeadAttention(16, 4, score=ch.Dot().then(Learnt()))
    x = draw(2, 10, 16)
    module(x, x, x)
    before = module.attention_weights.dense()
    assert "score.changed_by.rate" in dict(module.named_parameters())
    same(before.sum(-1), torch.ones(2, 4, 10))
    module.score.changed_by.rate.data += 1.0  # the record has a copy of what is trained
    same(module.attention_weights.dense(), before)


def test_copies_and_pickles():
    score = ch.Dot().then(lean)
    query, key, value = (t.detach() for t in inputs())
    for other in (copy.deepcopy(score), pickle.loads(pickle.dumps(score))):
        same(ch.attention(query, key, value, score=other), ch.attention(query, key, value, score=score))


# ---------------------------------------------------------------------------------------------- what functions may read


def test_a_tensor_that_is_written_to_between_the_passes_is_an_error(small_blocks):
    query, key, value = inputs()
    table = torch.ones(60)
    output = ch.attention(query, key, value, score=ch.Dot().then(lambda s, b, h, i, j: s * table[j]))
    table.mul_(2)
    with pytest.raises(ch.ClearheadError, match="the score"):
        output.sum().backward()


def test_lazy_weights_notice_a_write():
    query, key, _ = (t.detach() for t in inputs())
    table = torch.ones(60)
    lazy = ch.weights(query, key, score=ch.Dot().then(lambda s, b, h, i, j: s * table[j]))
    first = lazy.dense()
    table.fill_(0.0)
    same(lazy.dense(), torch.full_like(first, 1 / 60))


class Holder:
    def __init__(self):
        self.rate = torch.tensor(0.2, requires_grad=True)

    def change(self, score, batch, head, i, j):
        return score / (1 + self.rate * (i - j).abs())


def test_methods_partials_arrays_and_branches_on_settings(small_blocks):
    query, key, value = inputs()
    holder, array = Holder(), np.linspace(0.5, 1.0, 60, dtype=np.float32)
    by_keyword = functools.partial(lambda s, b, h, i, j, *, rate: s / (1 + rate * (i - j).abs()), rate=0.2)
    plain = lambda s, b, h, i, j: s / (1 + 0.2 * (i - j).abs())
    want = formula(query, key, plain) @ value
    for change in (holder.change, by_keyword):
        same(ch.attention(query, key, value, score=ch.Dot().then(change)), want)
    output = ch.attention(query, key, value, score=ch.Dot().then(holder.change))
    (grad,) = torch.autograd.grad(output.sin().sum(), holder.rate)
    again = formula(query, key, holder.change) @ value
    same(grad, torch.autograd.grad(again.sin().sum(), holder.rate)[0], atol=1e-4)
    of_numpy = lambda s, b, h, i, j: s * torch.from_numpy(array)[j] if array.any() else s
    same(ch.attention(query, key, value, score=ch.Dot().then(of_numpy)), formula(query, key, of_numpy) @ value)


def test_what_was_computed_before_is_trained_too(small_blocks):
    """A tensor with a history of its own: the gradient goes on into it, once."""
    query, key, value = inputs()
    source = torch.tensor(0.3, requires_grad=True)
    calls = []
    table = source.exp() * torch.ones(60)
    table.register_hook(lambda grad: calls.append(grad))
    change = lambda s, b, h, i, j: s * table[j]
    got = torch.autograd.grad(ch.attention(query, key, value, score=ch.Dot().then(change)).sin().sum(), source)
    assert len(calls) == 1
    again = source.exp() * torch.ones(60)
    want = formula(query, key, lambda s, b, h, i, j: s * again[j]) @ value
    same(got[0], torch.autograd.grad(want.sin().sum(), source)[0], atol=1e-4)


def test_random_draws_are_drawn_alike_in_both_passes(small_blocks):
    """A score that draws is left to checkpoints, which draw again what was drawn."""
    query, key, value = inputs()

    def noisy(query, key):
        return query @ key.mT * (torch.rand(()) + 0.5)

    found = []
    for _ in range(2):
        torch.manual_seed(3)
        output = ch.attention(query, key, value, score=noisy)
        found.append((output.detach(), *torch.autograd.grad(output.sum(), (query, key, value))))
    for one, other in zip(*found, strict=True):
        same(one, other)
    sums = (found[0][3].sum((-2, -1)) / 8).detach()  # Σ_j of the gradient to value is the number of queries
    same(sums, torch.full_like(sums, 40.0), atol=1e-3)


def test_trained_under_the_callers_checkpoint_and_hooks(small_blocks):
    query, key, value = inputs()
    learnt = Learnt()
    attend = lambda q, k, v: ch.attention(q, k, v, score=ch.Dot().then(learnt))
    want = torch.autograd.grad(attend(query, key, value).sin().sum(), (query, learnt.rate))
    checkpointed = torch.utils.checkpoint.checkpoint(attend, query, key, value, use_reentrant=False)
    with torch.autograd.graph.save_on_cpu():
        moved = attend(query, key, value)
    for output in (checkpointed, moved):
        for one, other in zip(torch.autograd.grad(output.sin().sum(), (query, learnt.rate)), want, strict=True):
            same(one, other)


def test_no_block_is_computed_more_often_than_needed(small_blocks):
    """Once forward and once backward, and the first block once more."""
    query, key, value = inputs()
    pairs = []

    def counting(score, batch, head, i, j):
        pairs.append(score.numel())
        return score

    score = ch.Dot().then(counting)  # which tries the function
    pairs.clear()
    ch.attention(query, key, value, score=score).sum().backward()
    assert sum(pairs) <= 2 * 2 * 4 * 40 * 60 + pairs[0]


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s, b, h, i: s, "got <function <lambda>"),
        (3, "got 3"),
        (Learnt, r"got <class .*Learnt"),
    ],
)
def test_what_is_no_change(change, said):
    with pytest.raises(ch.ClearheadError, match=said):
        ch.Dot().then(change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda s, b, h, i, j: s[..., :1, :2],
            r"\(2, 4, 1, 2\) of torch.float32 on cpu; expected .* broadcasts to \(2, 4, 6, 7\)",
        ),
        (lambda s, b, h, i, j: s > 0, "expected floating-point numbers"),
        (lambda s, b, h, i, j: 1.0, "expected floating-point numbers"),
        (lambda s, b, h, i, j: s.to(torch.complex64), "expected floating-point numbers"),
        (lambda s, b, h, i, j: s.to_sparse(), "expected floating-point numbers"),
        (lambda s, b, h, i, j: s if i > j else -s, "(?s)failed on scores .* torch.where"),
        (lambda s, b, h, i, j: torch.einsum("gh,bhij->bgij", torch.eye(3), s), "no mixing of heads"),
    ],
)
@pytest.mark.parametrize("engine", ["tiled", "reference"])
def test_wrong_results_are_one_clear_error(change, said, engine):
    query, key, value = (t.detach() for t in inputs(6, 7))
    with pytest.raises(ch.ClearheadError, match=said):
        ch.attention(query, key, value, score=ch.Dot().then(change), engine=engine)


def test_results_that_broadcast_or_are_wider():
    query, key, value = (t.detach() for t in inputs(6, 7))
    ignoring = ch.attention(query, key, value, score=ch.Dot().then(lambda s, b, h, i, j: (i - j) / 3))
    same(ignoring, formula(query, key, lambda s, b, h, i, j: ((i - j) / 3).expand_as(s)) @ value)
    same(
        ch.attention(query, key, value, score=ch.Dot().then(lambda s, *_: s.double())), ch.attention(query, key, value)
    )


def test_blocks_follow_a_rule_that_is_kept():
    """Documents as a rule: the keys of other documents are left out, and rows that see nothing give 0."""
    ids = torch.arange(512) // 64
    x = draw(2, 4, 512, 8)
    mask = ch.MaskFunction(lambda b, h, i, j: (ids[i] == ids[j]) & (i != 100))
    assert ch.plan(x, x, x, score=ch.Dot().then(lean), mask=mask).skipped > 0.7
    got = ch.attention(x, x, x, score=ch.Dot().then(lean), mask=mask)
    same(got, ch.attention(x, x, x, score=ch.Dot().then(lean), mask=mask, engine="reference"))
    assert (got[:, :, 100] == 0).all()


RATES = torch.nn.ParameterList([torch.tensor(rate, dtype=torch.float64) for rate in (0.1, 0.2, 0.3, 0.4)])
HIDES = types.SimpleNamespace(rates=RATES)


def by_list(score, batch, head, i, j):
    """A change that reads only the parameters of the heads that it is asked for."""
    return score / (1 + torch.stack([RATES[h] for h in head.flatten().tolist()]).view(head.shape) * (i - j).abs())


def hidden(score, batch, head, i, j):
    """The same, in a way that the code does not show."""
    rates = [getattr(HIDES, "rates")[h] for h in head.flatten().tolist()]  # noqa: B009
    return score / (1 + torch.stack(rates).view(head.shape) * (i - j).abs())


class Experts(ch.extend.Score):
    """Queries of two kinds, each with a parameter of its own, which a block without such queries does not read."""

    def __init__(self):
        super().__init__()
        self.low, self.high = (torch.nn.Parameter(torch.tensor(x)) for x in (0.5, 2.0))

    def tile(self, query, key):
        first, scores = query[..., :1] < 0, query @ key.mT
        for of, rate in ((first, self.low), (~first, self.high)):
            if of.any():
                scores = torch.where(of, scores * rate, scores)
        return scores


def test_each_block_may_read_other_parameters(small_blocks):
    query, key, value = inputs(60, 60, dtype=torch.float64)
    experts = Experts().double()
    with torch.no_grad():
        query[..., 0].abs_()
        query[0, :2, :, 0] *= -1  # the first blocks read one parameter, the last ones the other
    for score, leaves in ((ch.Dot().then(by_list), list(RATES)), (experts, list(experts.parameters()))):
        found = []
        for engine in ("tiled", "reference"):
            output = ch.attention(query, key, value, score=score, engine=engine)
            found.append(torch.autograd.grad(output.sin().sum(), [*leaves, query]))
        for one, other in zip(*found, strict=True):
            same(one, other, rtol=1e-9, atol=1e-9)


LAYERS = torch.nn.ModuleList([torch.nn.Linear(1, 1, dtype=torch.float64) for _ in range(4)])
NAMED = {head: [layer] for head, layer in enumerate(LAYERS)}


def by_layers(score, batch, head, i, j):
    """A change by the layer of each head, of PyTorch's list of modules."""
    found = [LAYERS[h](score[:, [n], :, :, None]) for n, h in enumerate(head.flatten().tolist())]
    return torch.cat(found, 1).squeeze(-1)


def by_named_layers(score, batch, head, i, j):
    """The same of a dict of lists of modules."""
    found = [NAMED[h][0](score[:, [n], :, :, None]) for n, h in enumerate(head.flatten().tolist())]
    return torch.cat(found, 1).squeeze(-1)


@pytest.mark.parametrize("change", [by_layers, by_named_layers])
@pytest.mark.parametrize("learnt", [True, False])
def test_each_block_may_call_other_layers(change, learnt, small_blocks):
    query, key, value = inputs(60, 60, dtype=torch.float64)
    leaves = [*LAYERS.parameters(), *[query] * learnt]
    for one in (query, key, value):
        one.requires_grad_(learnt)
    output = ch.attention(query, key, value, score=ch.Dot().then(change), engine="tiled")
    want = formula(query, key, change) @ value
    grads = (torch.autograd.grad(one.sin().sum(), leaves) for one in (output, want))
    for one, other in zip(*grads, strict=True):
        same(one, other, rtol=1e-9, atol=1e-9)


def late(score, batch, head, i, j):
    """The change `hidden` of the last two heads: for the first ones no parameter is read."""
    return torch.where(head < 2, score, hidden(score, batch, head, i, j)) if int(head.max()) > 1 else score


@pytest.mark.parametrize("change", [hidden, late])
@pytest.mark.parametrize("learnt", [True, False])
def test_a_tensor_that_no_name_shows_is_named_in_reads(change, learnt, small_blocks):
    query, key, value = (t.detach().requires_grad_(learnt) for t in inputs(60, 60, dtype=torch.float64))
    leaves = list(RATES)[2:] if change is late else list(RATES)
    want = torch.autograd.grad((formula(query, key, change) @ value).sin().sum(), leaves)
    output = ch.attention(query, key, value, score=ch.Dot().then(change, reads=list(RATES)), engine="tiled")
    for one, other in zip(torch.autograd.grad(output.sin().sum(), leaves), want, strict=True):
        same(one, other, rtol=1e-9, atol=1e-9)
    for again in (False, True):
        if change is late and not learnt:  # each block has a checkpoint, which autograd follows
            output = ch.attention(query, key, value, score=ch.Dot().then(change), engine="tiled")
            for one, other in zip(torch.autograd.grad(output.sin().sum(), leaves), want, strict=True):
                same(one, other, rtol=1e-9, atol=1e-9)
            continue
        with pytest.raises(ch.UnsupportedError, match=r"Name it: .*reads="):
            output = ch.attention(query, key, value, score=ch.Dot().then(change), engine="tiled")
            output.sum().backward(create_graph=again)


def test_reads_of_functions_and_biases(small_blocks):
    query, key, value = inputs(60, 60, dtype=torch.float64)
    held = types.SimpleNamespace(rate=torch.tensor(0.5, dtype=torch.float64, requires_grad=True))
    name = "rate"

    def score(query, key):
        return query @ key.mT * getattr(held, name)

    def bias(batch, head, i, j):
        return (i - j).abs() * getattr(held, name)

    for given in (
        {"score": ScoreFunction(score, reads=[held.rate])},
        {"bias": ch.BiasFunction(bias, reads=[held.rate])},
    ):
        grads = []
        for engine in ("tiled", "reference"):
            output = ch.attention(query, key, value, **given, engine=engine)
            grads.append(torch.autograd.grad(output.sin().sum(), [query, held.rate]))
        for one, other in zip(*grads, strict=True):
            same(one, other, rtol=1e-9, atol=1e-9)
    for given in ({"score": score}, {"bias": ch.BiasFunction(bias)}):
        with pytest.raises(ch.UnsupportedError, match="reads="):
            ch.attention(query, key, value, **given, engine="tiled")


@pytest.mark.parametrize("frozen", [True, False])
def test_parameters_of_functional_call_lose_no_gradient(frozen, small_blocks):
    """They are in place during the call alone: the backward pass would read the module's own."""
    query, key, value = (t.detach() for t in inputs(60, 60))
    learnt = Learnt().requires_grad_(not frozen)

    def attended(query, change):
        return ch.attention(query, key, value, score=ch.Dot().then(change), engine="tiled").sin().sum()

    class Attend(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.change = learnt

        def forward(self, query):
            return attended(query, self.change)

    rate = torch.tensor([0.5, 0.6, 0.7, 0.8])
    call = functools.partial(torch.func.functional_call, Attend())
    for again, power in ((False, 1), (True, 1), (False, 2), (True, 2)):  # a square is no leaf
        leaf = rate.clone().requires_grad_()
        given = {"change.rate": leaf if power == 1 else leaf**power}
        output = call(given, (query.clone().requires_grad_(),))
        with pytest.raises(ch.UnsupportedError, match=r"Take gradients by torch\.func\.grad"):
            output.backward(create_graph=again)
    got = torch.func.grad(lambda rate: call({"change.rate": rate}, (query,)))(rate)
    wanted = rate.clone().requires_grad_()
    weights = formula(query, key, lambda s, b, h, i, j: s / (1 + wanted[h] * (i - j).abs()))
    (weights @ value).sin().sum().backward()
    same(got, wanted.grad, atol=2e-4)


def test_a_parameter_that_is_frozen_before_the_backward_pass_gets_no_gradient(small_blocks):
    """As in plain PyTorch, and the gradients of the others are the same."""
    query, key, value = inputs(60, 60)
    for again in (False, True):
        learnt = Learnt()
        output = ch.attention(query, key, value, score=ch.Dot().then(learnt), engine="tiled")
        learnt.rate.requires_grad_(False)
        (got,) = torch.autograd.grad(output.sin().sum(), query, create_graph=again)
        (want,) = torch.autograd.grad((formula(query, key, learnt) @ value).sin().sum(), query)
        same(got, want, atol=2e-5)


def test_a_tensor_that_a_module_of_torch_holds(small_blocks):
    query, key, value = inputs(60, 60)
    module, rates = torch.nn.Module(), torch.tensor([0.1, 0.2, 0.3, 0.4], requires_grad=True)
    for module.rates in (rates, rates.exp()):
        score = ch.Dot().then(lambda score, batch, head, i, j: score * module.rates[head])
        grads = [
            torch.autograd.grad(ch.attention(query, key, value, score=score, engine=engine).sum(), rates, None, True)[0]
            for engine in ("tiled", "reference")
        ]
        same(*grads, atol=2e-4)


def test_blocks_share_a_cached_parametrization(small_blocks):
    """Its graph serves the gradients of all blocks."""
    query, key, value = inputs(60, 60)
    learnt, grads = Learnt(), []
    torch.nn.utils.parametrize.register_parametrization(learnt, "rate", torch.nn.Softplus())
    score = ch.Dot().then(learnt)
    for engine in ("tiled", "reference"):
        with torch.nn.utils.parametrize.cached():
            output = ch.attention(query, key, value, score=score, engine=engine)
            grads.append(torch.autograd.grad(output.sin().sum(), [query, *learnt.parameters()]))
    for one, other in zip(*grads, strict=True):
        same(one, other, atol=2e-4)


@pytest.mark.parametrize("change", [by_list, hidden])
def test_a_parameter_that_is_written_to_before_the_backward_pass(change, small_blocks):
    query, key, value = inputs(60, 60)
    output = ch.attention(
        query[:, :1], key[:, :1], value[:, :1], score=ch.Dot().then(change, reads=list(RATES)), engine="tiled"
    )
    with torch.no_grad():
        RATES[0].mul_(1)
    with pytest.raises(ch.ClearheadError, match="modified in place"):
        output.sum().backward()


def test_a_parameter_of_a_function_gets_no_gradient_where_no_key_is_seen(monkeypatch):
    monkeypatch.setattr(regions, "BUDGET", 3)
    table = torch.nn.Parameter(torch.tensor([0.5, 2.0]))
    query, key, value = draw(2, 2, 5, 3).requires_grad_(), draw(2, 1, 1, 3), draw(2, 1, 1, 2)
    score = ch.Dot().then(lambda scores, batch, head, i, j: scores * table[head])
    output = ch.attention(query, key, value, score=score, mask=ch.Lengths([0, 0]), engine="tiled")
    output.sum().backward()
    assert not output.any() and not query.grad.any() and (table.grad is None or not table.grad.any())
