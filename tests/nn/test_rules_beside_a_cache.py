"""Rules of masks, biases and scores beside a cache: the steps are the whole sequence at once, computed by hand."""

import copy
import math
from typing import NamedTuple

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.engines.flex import rules
from clearhead.nn import KeyValueCache, MultiHeadAttention
from clearhead.nn._rule_offsets import OffsetRule

E, HEADS, LENGTH, PARTS = 8, 2, 9, (5, 1, 2, 1)
LIMITS = [{}, {"capacity": 11}]


class Wave(nn.Module):
    """A rule of all four indices, with one learnt number; after a score it is added to it."""

    def __init__(self):
        super().__init__()
        self.height = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, *given):
        *score, batch, head, i, j = given
        return sum(score) + self.height * torch.sin((3 * i + 2 * j + head + 5 * batch).double())


def allowed(batch, head, i, j):
    return (i >= j) & ((i - j < 4) | (j == batch + head))


class Every(ch.extend.Mask):
    """A mask that holds others in a list."""

    def __init__(self, *masks):
        self.masks = [*masks]

    def lower(self, sizes):
        joined = self.masks[0]
        for mask in self.masks[1:]:
            joined = joined & mask
        return joined.lower(sizes)


class Twice(ch.extend.Bias):
    """A bias that holds another one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def lower(self, sizes):
        added = self.inner.lower(sizes)
        return ch.extend.Added(function=lambda *sides: 2 * added.function(*sides), reads=added.reads)


class Pair(NamedTuple):
    left: ch.extend.Mask
    right: ch.extend.Mask


class Chosen(ch.extend.Mask):
    """A mask that holds others in a dict of named tuples."""

    def __init__(self, **pairs):
        self.pairs = pairs

    def lower(self, sizes):
        return (self.pairs["these"].left & self.pairs["these"].right).lower(sizes)


class Listed(ch.extend.Bias):
    """A bias that holds others in a list, and a mask whose hidden pairs have −9."""

    def __init__(self, mask, *biases):
        super().__init__()
        self.mask, self._biases = mask, [*biases]

    def lower(self, sizes):
        keep = self.mask.lower(sizes).residual(*[slice(None)] * 4)
        added = ch.extend.Added(dense=torch.where(keep, 0.0, -9.0).double())
        for bias in self._biases:
            added = added.plus(bias.lower(sizes))
        return added


def shifts(batch, head, i, j):
    return 0.3 * (i - j).abs().double() * (head + 1)


def odd(batch, head, i, j):
    return (i + j + batch + head) % 3 > 0


WAVE = Wave()
RULE = ch.MaskFunction(allowed)
# name: (mask, bias of the module, bias of the call, the change of the score, then what is allowed and what is added)
CASES = {
    "mask": (RULE, None, None, None, allowed, None),
    "joined": (ch.Causal() & ~~RULE, None, None, None, allowed, None),
    "in a list": (Every(ch.Causal(), RULE), None, None, None, allowed, None),
    "bias": (RULE, ch.BiasFunction(WAVE), None, None, allowed, WAVE),
    "sum": (RULE, Twice(ch.BiasFunction(WAVE)), ch.BiasFunction(shifts), None, allowed,
            lambda *at: 2 * WAVE(*at) + shifts(*at)),
    "held": (Chosen(these=Pair(ch.Causal(), RULE)), Listed(ch.MaskFunction(odd), ch.BiasFunction(shifts)), None, None,
             allowed, lambda *at: torch.where(odd(*at), 0.0, -9.0) + shifts(*at)),
    "then": (RULE, None, None, WAVE, allowed, WAVE),
}  # fmt: skip


def make(name):
    torch.manual_seed(0)
    _, own, _, change, *_ = CASES[name]
    score = None if change is None else ch.Dot().then(change)
    return MultiHeadAttention(E, HEADS, score=score, score_bias=own).double()


def inputs(batch=2):
    return torch.randn(batch, LENGTH, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def by_hand(attend, name, x):
    """The output and the weights of the whole sequence, by the formula."""
    *_, keep, added = CASES[name]
    q, k, v = (w(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (attend.W_q, attend.W_k, attend.W_v))
    at = torch.arange(LENGTH)
    places = (torch.arange(len(x)).view(-1, 1, 1, 1), torch.arange(HEADS).view(1, -1, 1, 1), at[:, None], at)
    scores = q @ k.mT / math.sqrt(E / HEADS) + (0 if added is None else added(*places))
    weights = scores.masked_fill(~keep(*places), -math.inf).softmax(-1)
    return attend.W_o((weights @ v).transpose(1, 2).flatten(2)), weights


def steps(attend, name, x, cache, call=None):
    mask, _, bias, *_ = CASES[name]
    return [(call or attend)(part, part, part, mask, bias=bias, cache=cache) for part in x.split(PARTS, 1)]


@pytest.mark.parametrize("limits", LIMITS, ids=["growing", "capacity"])
@pytest.mark.parametrize("name", CASES)
def test_the_steps_are_the_whole(name, limits):
    attend, x = make(name), inputs()
    with torch.no_grad():
        output, weights = by_hand(attend, name, x)
        torch.testing.assert_close(torch.cat(steps(attend, name, x, KeyValueCache(**limits)), 1), output)
        last = attend.attention_weights[...][..., :LENGTH]
    torch.testing.assert_close(last, weights[:, :, -PARTS[-1] :])


@pytest.mark.parametrize("name", ["bias", "sum", "then"])
def test_gradients(name):
    attend, x = make(name), inputs()
    learnt = [WAVE.height, attend.W_q.weight, attend.W_k.weight]
    ours = torch.autograd.grad(torch.cat(steps(attend, name, x, KeyValueCache()), 1).square().sum(), learnt)
    torch.testing.assert_close(ours, torch.autograd.grad(by_hand(attend, name, x)[0].square().sum(), learnt))


@pytest.mark.parametrize("name", ["mask", "then"])
def test_gradients_of_recorded_weights(name):
    attend, x = make(name), inputs()
    attend.record_gradients = True
    steps(attend, name, x, KeyValueCache())
    ours = torch.autograd.grad(attend.attention_weights[...].square().sum(), attend.W_q.weight)
    weights = by_hand(attend, name, x)[1][:, :, -PARTS[-1] :]
    torch.testing.assert_close(ours, torch.autograd.grad(weights.square().sum(), attend.W_q.weight))


@pytest.mark.parametrize("limits", LIMITS, ids=["growing", "capacity"])
@pytest.mark.parametrize("name", ["sum", "then"])
def test_sequences_that_stand_at_unequal_places(name, limits):
    """After a prompt of 5 and one of 3, two more of each."""
    attend, x, cache = make(name), inputs(), KeyValueCache(**limits)
    mask, _, bias, *_ = CASES[name]
    with torch.no_grad():
        output = by_hand(attend, name, x)[0]
        prompt = x[:, :5]
        attend(prompt, prompt, prompt, mask, bias=bias, cache=cache, new_lens=[5, 3])
        new = torch.stack([x[0, 5:7], x[1, 3:5]])
        found = attend(new, new, new, mask, bias=bias, cache=cache)
    torch.testing.assert_close(found, torch.stack([output[0, 5:7], output[1, 3:5]]))


@pytest.mark.parametrize("limits", LIMITS, ids=["growing", "capacity"])
@pytest.mark.parametrize("name", ["bias", "sum", "then"])
def test_compiled_steps(name, limits):
    attend, x, cache, graphs = make(name), inputs(1), KeyValueCache(**limits), []

    def counting(module, _):
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    call = torch.compile(attend, backend=counting, fullgraph=True)
    mask, _, bias, *_ = CASES[name]
    with torch.no_grad():
        prompt, *tokens = x.split((5, 1, 1, 1, 1), 1)
        attend(prompt, prompt, prompt, mask, bias=bias, cache=cache)
        found, counts = [], []
        for token in tokens:
            found.append(call(token, token, token, mask, bias=bias, cache=cache))
            counts.append(len(graphs))
        torch.testing.assert_close(torch.cat(found, 1), by_hand(attend, name, x)[0][:, 5:])
    assert counts[-1] == counts[0 if limits else -2]  # one graph; beside a cache that grows, one for any length at last


def test_a_kernel_takes_the_length_of_the_cache_as_an_input():
    """flex compiles a kernel for the code of a rule: the code is the same at every step."""
    device = torch.device("cpu")
    one, other = (rules._traced(OffsetRule(allowed, past, device), device, False) for past in (5, 6))
    assert one.code == other.code and [t.tolist() for t in one.tensors + other.tensors] == [[5], [6]]
    each = rules._traced(OffsetRule(allowed, torch.tensor([3, 4]), device), device, False)
    at = [torch.tensor([n]) for n in (1, 0, 0, 4)]  # query 0 of sequence 1 stands at 4
    assert each.at(*at).item() and not each.at(at[0] * 0, *at[1:]).item()


def test_explanations_and_watched_calls():
    attend, x, cache = make("sum").eval(), inputs(1), KeyValueCache()
    mask, _, bias, *_ = CASES["sum"]
    with torch.no_grad():
        output, weights = by_hand(attend, "sum", x)
        attend(x[:, :7], x[:, :7], x[:, :7], mask, bias=bias, cache=cache)
        new = x[:, 7:]
        found = ch.explain(attend, new, new, new, mask, bias=bias, cache=cache)
        torch.testing.assert_close(found["result"], output[:, 7:])
        with ch.watch(attend) as run:
            attend(new, new, new, mask, bias=bias, cache=cache)
    torch.testing.assert_close(run[0].weights[...], weights[:, :, 7:])


def test_the_callers_objects_stay_as_they_are():
    for name in CASES:
        before = [copy.copy(vars(thing)) for thing in CASES[name][:3] if thing is not None]
        attend = make(name)
        with torch.no_grad():
            steps(attend, name, inputs(), KeyValueCache())
        for thing, had in zip([thing for thing in CASES[name][:3] if thing is not None], before, strict=True):
            now = {key: value for key, value in vars(thing).items() if not key.startswith("_clearhead_kept")}
            assert all(now[key] is had[key] for key in now)


def test_a_call_without_a_cache_counts_from_0():
    """As documented: there the rule places the queries itself."""
    x = inputs(1)[:, None]
    rule = ch.MaskFunction(lambda batch, head, i, j: j <= i)
    keep = torch.ones(2, LENGTH).tril().bool()
    for align in (None, "lower_right", 4):
        torch.testing.assert_close(
            ch.attention(x[:, :, :2], x, x, mask=rule, align=align), ch.attention(x[:, :, :2], x, x, mask=keep)
        )
