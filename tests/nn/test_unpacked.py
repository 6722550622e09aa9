"""`out, weights = module(x, x, x)`: a batch of two is refused, and what is meant otherwise works."""

# ruff: noqa: RUF059 - the names are what is tested
import pytest
import torch

import clearhead as ch
from clearhead import nn

MODULES = {
    "MultiHeadAttention": lambda: nn.MultiHeadAttention(8, 2),
    "DotProductAttention": nn.DotProductAttention,
    "AdditiveAttention": lambda: nn.AdditiveAttention(4),
}
X = torch.rand(2, 5, 8)


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


def test_hooks_of_modules_stand_between(attend):
    attend.register_forward_hook(lambda module, inputs, output: output)
    attend.register_forward_pre_hook(lambda module, inputs: inputs)
    with pytest.raises(ch.ClearheadError, match="unpacks it into two"):
        output, weights = attend(X, X, X)
    with ch.watch(attend), pytest.raises(ch.ClearheadError, match="unpacks it into two"):
        output, weights = attend(X, X, X)


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
