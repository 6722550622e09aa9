"""Caches of fixed capacity and of a window, beside whole sequences in plain PyTorch; and caches with a part for each
layer."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

import clearhead as ch
from clearhead.nn import KeyValueCache, MultiHeadAttention, RotaryEmbedding

MODULES = {
    "dot": {},
    "groups and rotary": {"num_kv_heads": 2, "rotary": RotaryEmbedding(4)},
    "additive": {"score": lambda: ch.Additive(4, 4, hidden_dim=8)},
}
WINDOW, FIRST = 5, 2
LONG = ch.Causal() & (ch.SlidingWindow(before=WINDOW - 1) | ch.FirstKeys(FIRST))
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def make(name, dtype=torch.float32):
    torch.manual_seed(0)
    options = {key: value() if key == "score" else value for key, value in MODULES[name].items()}
    return MultiHeadAttention(16, 4, **options).eval().to(dtype)


def whole(attend, x, window):
    """One sequence (L, E) in one causal call, in float64 and without clearhead. A window also sees the first keys."""
    attend, x, length = copy.deepcopy(attend).double(), x.double(), len(x)
    q, k, v = ((x @ w.weight.T + w.bias).unflatten(1, (-1, 4)).transpose(0, 1) for w in
               (attend.W_q, attend.W_k, attend.W_v))  # fmt: skip
    if attend.rotary is not None:
        angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, 4, 2) / 4)
        turns = torch.polar(torch.ones_like(angles.double()), angles.double())
        q, k = (torch.cat([(z := torch.complex(*t.chunk(2, -1)) * turns).real, z.imag], -1) for t in (q, k))
    k, v = (t.repeat_interleave(4 // len(t), 0) for t in (k, v))
    if isinstance(attend.score, ch.Additive):
        hidden = torch.tanh((q @ attend.score.W_q.T)[:, :, None] + (k @ attend.score.W_k.T)[:, None])
        scores = hidden @ attend.score.w_v
    else:
        scores = q @ k.mT / 2
    i, j = torch.arange(length)[:, None], torch.arange(length)
    keep = (j <= i) & ((i - j < WINDOW) | (j < FIRST) | (not window))
    heads = scores.masked_fill(~keep, -torch.inf).softmax(-1) @ v
    return heads.transpose(0, 1).flatten(1) @ attend.W_o.weight.T + attend.W_o.bias


def decoded(attend, step, cache, x, prompt, lens=None, sizes=(1,), mask=None):
    """The outputs of each sequence, and its inputs: a prompt in eager code, then parts of these sizes by `step`."""
    mask = ch.Causal() if mask is None else mask
    ends, parts = lens or [prompt] * len(x), itertools.cycle(sizes)
    at, kept = prompt, [[row[:end]] for row, end in zip(x, ends, strict=True)]
    first = x[:, :prompt]
    output = attend(first, first, first, mask, cache=cache, new_lens=lens)
    found = [[row[:end]] for row, end in zip(output, ends, strict=True)]
    while at < x.shape[1]:
        size = min(next(parts), x.shape[1] - at)
        part, at = x[:, at : at + size], at + size
        for n, output in enumerate(step(part, part, part, mask, cache=cache)):
            found[n].append(output)
            kept[n].append(part[n])
    return [torch.cat(rows) for rows in found], [torch.cat(rows) for rows in kept]


def check(name, window, batch=3, unequal=True, prompt=6, steps=20, sizes=(1,), dtype=torch.float32, backend=None,
          mask=None):  # fmt: skip
    """Decode, compare with whole sequences and with a cache that grows, and give the number of graphs."""
    attend, graphs = make(name, dtype), []
    x = torch.randn(batch, prompt + steps, 16).to(dtype)

    def counting(graph, inputs):
        graphs.append(graph)
        return lookup_backend(backend)(graph, inputs)

    torch._dynamo.reset()
    step = attend if backend is None else torch.compile(attend, backend=counting, fullgraph=True)
    cache = KeyValueCache(window=WINDOW, first=FIRST) if window else KeyValueCache(capacity=prompt + steps)
    lens = [prompt - 2 * n for n in range(batch)] if unequal else None
    with torch.no_grad():
        found, inputs = decoded(attend, step, cache, x, prompt, lens, sizes, mask)
        grown, _ = decoded(attend, attend, KeyValueCache(), x, prompt, lens, sizes, LONG if window else mask)
        for got, other, row in zip(found, grown, inputs, strict=True):
            for want in (other, whole(attend, row, window or mask is LONG).to(dtype)):
                torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert cache.lengths == tuple(len(row) for row in inputs)
    return len(graphs)


@pytest.mark.parametrize("sizes", [(1,), (3, 1, 9)], ids=str)
@pytest.mark.parametrize("unequal", [False, True], ids=["equal", "unequal"])
@pytest.mark.parametrize("window", [False, True], ids=["capacity", "window"])
@pytest.mark.parametrize("name", MODULES)
def test_parts_are_the_whole(name, window, unequal, sizes):
    check(name, window, unequal=unequal, sizes=sizes)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mask", [ch.Causal(), LONG, LONG & ~ch.PrefixLM(0) | LONG], ids=["causal", "long", "joined"])
def test_a_prompt_longer_than_the_window_and_masks(mask, batch):
    check("groups and rotary", True, batch, prompt=11, sizes=(1, 4), mask=mask)


def test_a_mask_may_see_less_than_the_window():
    """A window of three positions by the mask, in a cache of five and the first two."""
    attend, x, mask = make("groups and rotary"), torch.randn(2, 20, 16), ch.Causal() & ch.SlidingWindow(before=2)
    with torch.no_grad():
        found, _ = decoded(attend, attend, KeyValueCache(window=WINDOW, first=FIRST), x, 6, None, (1, 3), mask)
        torch.testing.assert_close(torch.stack(found), attend(x, x, x, mask))


@pytest.mark.parametrize(
    ("name", "window", "backend"),
    [("groups and rotary", True, "eager"), ("additive", False, "aot_eager"), ("dot", True, "aot_eager")],
)
def test_a_compiled_step_is_one_graph(name, window, backend):
    assert check(name, window, backend=backend) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
def test_inductor(inductor_cache):
    assert check("groups and rotary", False, 2, backend="inductor") == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("window", [False, True], ids=["capacity", "window"])
@pytest.mark.parametrize("name", MODULES)
def test_two_hundred_tokens_are_one_graph(name, window, batch, backend, dtype):
    assert check(name, window, batch, batch > 1, steps=200, backend=backend, dtype=dtype) == 1
    assert check(name, window, batch, False, steps=12, backend=backend, dtype=dtype, mask=LONG) == 1


class Layers(nn.Module):
    """Layers, each with its part of one cache."""

    def __init__(self, count=2):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(MultiHeadAttention(16, 4, rotary=RotaryEmbedding(4)) for _ in range(count))

    def forward(self, x, cache=None, new_lens=None):
        for number, layer in enumerate(self.layers):
            part = None if cache is None else cache.of(number)
            x = x + layer(x, x, x, ch.Causal(), cache=part, new_lens=new_lens)
        return x


def test_a_compiled_model_with_one_cache_for_its_layers():
    """The sequences rest by turns: `new_lens` is a tensor, which compiled code does not read."""
    model, x, cache, graphs = Layers().eval(), torch.randn(2, 14, 16), KeyValueCache(capacity=14), []
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)
    with torch.no_grad():
        want = model(x)
        model(x[:, :4], cache)
        for at in range(4, 14):
            for rests in (0, 1):
                lens = torch.tensor([1 - rests, rests])
                output = compiled(x[:, at : at + 1], cache, lens)
                row = int(lens.argmax())
                torch.testing.assert_close(output[row, 0], want[row, at], atol=2e-6, rtol=2e-6)
    assert cache.lengths == (14, 14) and len(graphs) == 1


def test_more_than_the_capacity_is_refused():
    attend, x = make("dot"), torch.randn(2, 9, 16)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        with pytest.raises(ch.ClearheadError, match=r"capacity of 8 positions.*would become \(9, 9\)"):
            attend(x, x, x, ch.Causal(), cache=KeyValueCache(capacity=8))
        cache = KeyValueCache(capacity=8)
        attend(x, x, x, ch.Causal(), cache=cache, new_lens=[8, 5])
        token, before = x[:, :1], cache._state.key.clone()
        for run, error in ((attend, ch.ClearheadError), (compiled, RuntimeError)):
            with pytest.raises(error, match="capacity"):
                run(token, token, token, ch.Causal(), cache=cache)
            assert cache.lengths == (8, 5)
            assert torch.equal(cache._state.key[0], before[0])
        assert attend(token, token, token, cache=cache, new_lens=[0, 1]) is not None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("limits", [{"capacity": 9}, {"window": 4}], ids=str)
def test_copies_reorders_and_crops(copied, limits):
    model, x, cache = Layers().eval(), torch.randn(2, 9, 16), KeyValueCache(**limits)
    with torch.no_grad():
        model(x[:, :4], cache)
        other = copied(cache)
        assert repr(other) == repr(cache)
        branch = model if copied is copy.copy else copy.deepcopy(model)
        branch(torch.randn(2, 1, 16), other)  # it writes to memory of its own
        cache.reorder(torch.tensor([1, 0, 1]))
        turned = x[[1, 0, 1]]
        whole = KeyValueCache(**limits)
        want = model(turned, whole)
        torch.testing.assert_close(model(turned[:, 4:5], cache), want[:, 4:5])
        cache.reorder(torch.tensor([2, 1, 0]))  # in the same memory
        if "window" in limits:
            with pytest.raises(ch.ClearheadError, match="window"):
                cache.crop(3)
            assert cache.lengths == (5, 5, 5)
        else:
            cache.crop([4, 3, 4])
            assert [cache.of(n).lengths for n in (0, 1)] == [(4, 3, 4)] * 2
            found = model(torch.stack([turned[0, 4:6], turned[1, 3:5], turned[2, 4:6]]), cache)
            torch.testing.assert_close(found[1], want[1, 3:5])
            torch.testing.assert_close(found[0], want[0, 4:6])
        cache.reset()
        assert cache.lengths is None and len(cache) == 0
        torch.testing.assert_close(model(x[:1, :6], cache), model(x[:1, :6], KeyValueCache(**limits)))


def test_reordering_may_leave_the_longest_sequence_out():
    attend, x, cache = make("groups and rotary"), torch.randn(3, 6, 16), KeyValueCache(capacity=8)
    with torch.no_grad():
        attend(x[:, :4], x[:, :4], x[:, :4], ch.Causal(), cache=cache, new_lens=[2, 4, 3])
        for order, kept in ((torch.tensor([2, 0, 2]), (3, 2, 3)), (torch.tensor([1, 1]), (2, 2))):
            cache.reorder(order)
            x = x[order]
            assert cache.lengths == kept and len(cache) == max(kept)
            found = attend(x[:, 5:], x[:, 5:], x[:, 5:], ch.Causal(), cache=copy.copy(cache))
            for row, length in enumerate(kept):
                own = torch.cat([x[row, :length], x[row, 5:]])
                torch.testing.assert_close(found[row].double(), whole(attend, own, False)[-1:], atol=2e-6, rtol=0)


def test_layers_that_share_a_cache_or_a_part_are_refused():
    model, x = Layers().eval(), torch.randn(1, 3, 16)
    with torch.no_grad():
        for cache in (KeyValueCache(capacity=8), KeyValueCache(capacity=8).of("shared"), KeyValueCache().of(0)):
            model.layers[0](x, x, x, cache=cache)
            with pytest.raises(ch.ClearheadError, match="for each layer"):
                model.layers[1](x, x, x, cache=cache)
            with pytest.raises(ch.ClearheadError, match="holds the keys of one module"):
                cache.of(1)
        parts = KeyValueCache(capacity=8)
        model(x, parts)
        with pytest.raises(ch.ClearheadError, match=r"cache=cache\.of\(layer\)"):
            model.layers[0](x, x, x, cache=parts)


def test_keys_with_a_graph_are_refused():
    attend, x, cache = make("dot"), torch.randn(1, 3, 16), KeyValueCache(capacity=8)
    with torch.inference_mode():
        attend(x, x, x, ch.Causal(), cache=cache)
    with pytest.raises(ch.ClearheadError, match="keeps no graph"):
        attend(x, x, x, ch.Causal(), cache=cache)
    assert cache.lengths == (3,)
    frozen = copy.deepcopy(attend).requires_grad_(False)
    assert frozen(x, x, x, ch.Causal(), cache=copy.deepcopy(cache)).shape == (1, 3, 16)
    with pytest.raises(ch.UnsupportedError, match=r"torch\.func"):
        torch.func.jvp(lambda x: frozen(x, x, x, cache=KeyValueCache(capacity=8)), (x,), (x,))


@pytest.mark.parametrize("fork", [lambda c: c, copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
@pytest.mark.parametrize("times", [1, 2])
def test_a_refused_call_takes_no_position_out_of_a_window(fork, times):
    """The newest key takes the place of the oldest, to which `crop` may go back."""
    attend, x, cache = make("dot"), torch.randn(2, 7, 16), KeyValueCache(window=4)
    with torch.no_grad():
        attend(x[:, :4], x[:, :4], x[:, :4], ch.Causal(), cache=cache)
        for token in x[:, 4:].split(1, 1)[:times]:
            with pytest.raises(ch.UnsupportedError, match="no bias"):
                attend(token, token, token, ch.Causal(), cache=cache, bias=torch.zeros(1, 1))
        cache = fork(cache)
        cache.crop([1, 2])
        token = x[:, 6:]
        found = attend(token, token, token, ch.Causal(), cache=cache)
    for row, kept in enumerate((1, 2)):
        own = torch.cat([x[row, :kept], token[row]])
        torch.testing.assert_close(found[row].double(), whole(attend, own, False)[-1:], atol=2e-6, rtol=0)


@pytest.mark.parametrize("whole_before", [True, False])
@pytest.mark.parametrize("given", [{"bias": torch.zeros(1, 1)}, {"mask": torch.ones(1, 5, dtype=torch.bool)}], ids=str)
def test_compiled_code_that_is_refused_takes_no_position_out_of_a_window(given, whole_before):
    """The compiler ends a graph before the refusal, and that graph has written the key."""
    torch._dynamo.reset()
    attend, x, cache = make("dot"), torch.randn(2, 7, 16), KeyValueCache(window=4)
    compiled = torch.compile(attend, backend="aot_eager")
    with torch.no_grad():
        attend(x[:, :4], x[:, :4], x[:, :4], ch.Causal(), cache=cache)
        if whole_before:
            token = x[:, 4:5]
            compiled(token, token, token, ch.Causal(), cache=copy.copy(cache))
        for token in x[:, 4:6].split(1, 1):
            with pytest.raises(ch.ClearheadError):
                compiled(token, token, token, **({"mask": ch.Causal()} | given), cache=cache)
        assert cache.lengths == (4, 4)
        cache.crop([1, 2])
        token = x[:, 6:]
        found = compiled(token, token, token, ch.Causal(), cache=cache)
    for row, kept in enumerate((1, 2)):
        own = torch.cat([x[row, :kept], token[row]])
        torch.testing.assert_close(found[row].double(), whole(attend, own, False)[-1:], atol=2e-6, rtol=0)


@pytest.mark.parametrize("limits", [{}, {"capacity": 9}, {"window": 9}], ids=str)
@pytest.mark.parametrize("fork", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_copy_that_is_made_in_inference_mode_goes_on_outside_it(limits, fork):
    attend, x, cache = make("dot").requires_grad_(False), torch.randn(2, 6, 16), KeyValueCache(**limits)
    with torch.inference_mode():
        attend(x[:, :4], x[:, :4], x[:, :4], ch.Causal(), cache=cache, new_lens=[4, 2])
        other = fork(cache)
    with torch.no_grad():
        found = [attend(t, t, t, ch.Causal(), cache=other) for t in x[:, 4:].split(1, 1)]
    for row, kept in enumerate((4, 2)):
        own = torch.cat([x[row, :kept], x[row, 4:]])
        torch.testing.assert_close(torch.cat(found, 1)[row].double(), whole(attend, own, False)[-2:], atol=2e-6, rtol=0)


def test_the_weights_of_a_call_can_be_read_until_the_next_write():
    attend, x, cache = make("dot"), torch.randn(2, 6, 16), KeyValueCache(window=3)
    with torch.no_grad():
        for token in x.split(1, 1):
            attend(token, token, token, ch.Causal(), cache=cache)
        weights = attend.attention_weights
        keys = torch.stack([attend.W_k(x[:, n]).unflatten(1, (4, 4)) for n in (3, 4, 5)], 2)
        query = attend.W_q(x[:, 5:]).unflatten(2, (4, 4)).transpose(1, 2)
        torch.testing.assert_close(weights.dense(), (query @ keys.mT / 2).softmax(-1))
        attend(token, token, token, ch.Causal(), cache=cache)
    with pytest.raises(ch.ClearheadError, match="modified"):
        weights.dense()


def test_keys_that_are_not_kept_reach_no_output():
    """Padding that is NaN, in a prompt and in later parts, with and without a window."""
    for limits in ({"capacity": 12}, {"window": 3}):
        attend, x, cache = make("groups and rotary"), torch.randn(2, 8, 16), KeyValueCache(**limits)
        clean = KeyValueCache(**limits)
        x[0, 2:4] = x[0, 6:8] = torch.nan
        with torch.no_grad():
            for at in (0, 4):
                part = x[:, at : at + 4]
                found = attend(part, part, part, ch.Causal(), cache=cache, new_lens=[2, 4])[0, :2]
                alone = x[:1, at : at + 2]
                want = attend(alone, alone, alone, ch.Causal(), cache=clean)[0]
                torch.testing.assert_close(found, want)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bias": ch.ALiBi(4)}, "no bias"),
        ({"mask": torch.ones(1, 4, dtype=torch.bool)}, "the mask is tensor"),
        ({"mask": ch.Causal() & ch.Padding(torch.ones(2, 6, dtype=torch.bool))}, "Padding"),
        ({"new_lens": [2, 0]}, "there are 1 new keys"),
        ({"new_lens": [1]}, r"new_lens has shape \(1,\)"),
    ],
)
def test_calls_that_a_window_refuses(given, words):
    attend, x, cache = make("dot"), torch.randn(2, 6, 16), KeyValueCache(window=4)
    given = {"mask": ch.Causal()} | given
    with torch.no_grad():
        want = attend(x, x, x, ch.Causal() & ch.SlidingWindow(before=3))[:, 5:]
        attend(x[:, :5], x[:, :5], x[:, :5], ch.Causal(), cache=cache)
        token = x[:, 5:]
        with pytest.raises(ch.ClearheadError, match=words):
            attend(token, token, token, cache=cache, **given)
        with pytest.raises(ch.ShapeError, match="batch, key heads"):
            attend(token[:1], token[:1], token[:1], ch.Causal(), cache=cache)
        torch.testing.assert_close(attend(token, token, token, ch.Causal(), cache=cache), want)
