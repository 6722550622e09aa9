"""`out, weights = module(x, x, x)`: a batch of two is refused, and what is meant otherwise works."""

# ruff: noqa: RUF059 - the names are what is tested
import functools
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from clearhead import nn

MODULES = {
    "MultiHeadAttention": lambda: nn.MultiHeadAttention(8, 2),
    "DotProductAttention": nn.DotProductAttention,
    "AdditiveAttention": lambda: nn.AdditiveAttention(4),
}
X = torch.rand(2, 5, 8)


def awaited(coroutine):
    """The result of a coroutine that waits for nothing; an event loop of another test may be running."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


@pytest.fixture(params=MODULES)
def attend(request):
    module = MODULES[request.param]()
    module(X, X, X)
    return module


def test_two_names_get_no_two_sequences(attend):
    with pytest.raises(ch.ClearheadError, match=r"(?s)returns the output alone.*\(2, 5, 8\).*attention_weights"):
        output, weights = attend(X, X, X)
    with pytest.raises(ch.ClearheadError, match="unpacks it into two"):
        output, _ = attend.forward(X, value=X, key=X)
    with pytest.raises(ch.ClearheadError, match="unpacks it into two"):
        _, (first, *others) = attend(X, X, X)


def test_the_function_gives_one_tensor_too():
    said = (
        r"(?s)attention returns the output alone.*\(2, 5, 8\).*output = attention\(…\); the weights are weights\(query"
    )
    with pytest.raises(ch.ClearheadError, match=said):
        output, weights = ch.attention(X, X, X)
    with pytest.raises(ch.ClearheadError, match=r"list\(output\)"):
        output, weights = ch.attention(X.numpy(), X.numpy(), X.numpy(), mask=ch.Causal())
    attention = functools.partial(ch.attention, mask=ch.Causal())
    with pytest.raises(ch.ClearheadError, match="unpacks it into two"):
        output, weights = attention(X, X, X)
    first, second = ch.attention(X, X, X).unbind(0)
    other, same = ch.attention(X, X, X), ch.attention(X, X, X)
    assert torch.equal(other, same) and torch.equal(first, same[0]) and torch.equal(second, same[1])
    one, two = map(ch.attention, (X, X), (X, X), (X, X))
    assert torch.equal(one, two)


def test_what_stands_between_passes_the_output_on(attend):
    attend.register_forward_pre_hook(lambda module, inputs: inputs)
    with pytest.raises(ch.ClearheadError, match="unpacks it into two"):
        output, weights = attend(X, X, X)
    with ch.watch(attend), pytest.raises(ch.ClearheadError, match="unpacks it into two"):
        output, weights = attend(X, X, X)


class Holder(torch.nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend, self.layers = attend, torch.nn.ModuleList([attend])

    def forward(self, x):
        return self.attend(x, x, x), self.attend.attention_weights


def test_the_module_is_known_by_any_name(attend):
    holder, given, named = Holder(attend), functools.partial(attend, X, X), {"value": X}

    def enclosed():
        output, weights = attend(X, X, **named)

    def attribute():
        output, weights = holder.attend(X, X, value=X)

    def item():
        for i in range(1):
            output, weights = holder.layers[i](X, X, X)

    def arguments():
        inputs = [X, X, X]
        output, weights = attend(*inputs)

    def partial():
        output, weights = given(X)

    for call in (enclosed, attribute, item, arguments, partial):
        with pytest.raises(ch.ClearheadError, match="unpacks it into two"):
            call()


def test_calls_that_give_something_else_are_right(attend):
    """The module runs inside the unpacked call, in a frame whose next instruction unpacks; what it gives is another."""
    holder, twice, asked = Holder(attend), [X, X], functools.partial(attend, X, X)

    async def waiting():
        return attend(X, X, X), 1

    found = [
        *(one for one, _ in zip(map(asked, twice), twice, strict=True)),
    ]
    for one, _ in zip(map(asked, twice), twice, strict=True):
        found.append(one)
    one, other = list(map(asked, twice))
    found += [one, other]
    one, other = tuple(map(asked, twice))
    found += [one, other]
    one, other = sorted(map(asked, twice), key=lambda output: 0)
    found += [one, other]
    one, other = [asked(x) for x in twice]
    found += [one, other]
    one, other = dict(zip("ab", map(asked, twice), strict=True)).values()
    found += [one, other]
    first, second = zip(*map(asked, twice), strict=True)  # of each sequence
    found += [torch.stack([a, b]) for a, b in zip(first, second, strict=True)]
    output, weights = holder(X)
    found.append(output)
    output, weights = torch.nn.Sequential(holder)(X)
    found.append(output)
    output, _ = awaited(waiting())
    found.append(output)
    one, two = checkpoint(attend, X, X, X, use_reentrant=False)
    found.append(torch.stack([one, two]))
    (one, two), _ = asked(X).unbind(), 1
    found.append(torch.stack([one, two]))
    one, *_ = asked(X)
    assert torch.equal(one, asked(X)[0])
    assert all(torch.equal(output, asked(X)) for output in found)


def test_a_hook_may_give_a_tuple(attend):
    attend.register_forward_hook(lambda module, inputs, output: (output, module.attention_weights))
    output, weights = attend(X, X, X)
    assert output.shape == X.shape and isinstance(weights, ch.results.Weights)


def test_without_the_places_of_instructions_nothing_is_refused():
    """What is called is then not known: right code must run."""
    code = """if True:
        import torch
        from clearhead.nn import DotProductAttention
        x, attend = torch.rand(2, 3, 4), DotProductAttention()
        first, second = attend(x, x, x)
        assert torch.equal(second, attend(x, x, x)[1])
    """
    subprocess.run([sys.executable, "-X", "no_debug_ranges", "-c", code], check=True)


def test_what_is_meant_works(attend):
    output = attend(X, X, X)
    first, second = output
    assert torch.equal(first, output[0]) and torch.equal(second, output[1])
    one, two = attend(X, X, X).unbind(0)
    assert torch.equal(one, first) and torch.equal(two, second)
    (whole,) = (attend(X, X, X),)
    assert torch.equal(whole, output)
    three = torch.cat([X, X[:1]])
    a, b, c = attend(three, three, three)
    assert torch.equal(torch.stack([a, b]), output) and torch.equal(c, first)
    pairs = {"it": attend(X, X, X), "again": attend(X, X, X)}
    assert torch.equal(pairs["again"], output)
    other, same = attend(X, X, X), attend(X, X, X)  # a tuple of two outputs
    assert torch.equal(other, same)
    with pytest.raises(ValueError, match=r"not enough values|too many values"):
        output, weights = attend(three, three, three)


def test_without_a_batch_and_with_a_cache():
    attend, cache, x = nn.MultiHeadAttention(8, 2).eval(), nn.KeyValueCache(), torch.rand(2, 8)
    with pytest.raises(ch.ClearheadError, match="unpacks it into two"):
        output, weights = attend(x, x, x)
    with torch.no_grad(), pytest.raises(ch.ClearheadError, match="unpacks it into two"):
        output, weights = attend(X, X, X, ch.Causal(), cache=cache)
    assert len(cache) == 0


def test_numpy_and_torchs_own_call():
    array = X.numpy()
    with pytest.raises(ch.ClearheadError, match=r"list\(output\)"):
        output, weights = nn.DotProductAttention()(array, array, array)
    output, weights = nn.TorchMultiheadAttention(8, 2, batch_first=True)(X, X, X)
    assert output.shape == (2, 5, 8) and weights.shape == (2, 5, 5)


def test_compiled_code_is_one_graph():
    attend = nn.MultiHeadAttention(8, 2).eval()

    @torch.compile(backend="eager", fullgraph=True)
    def run(x):
        return attend(x, x, x) + 1

    with torch.no_grad():
        assert torch.allclose(run(X), attend(X, X, X) + 1)
