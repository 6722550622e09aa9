"""A cache belongs to one module: another one is refused, in eager and in compiled code; copies go on by themselves."""

import copy
import os
import pickle
import random
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from clearhead.nn import KeyValueCache, MultiHeadAttention

X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))


def make(seed=0):
    torch.manual_seed(seed)
    return MultiHeadAttention(16, 4).eval()


class Layers(nn.Module):
    """Two layers, one after the other, each with the cache that it is given."""

    def __init__(self):
        super().__init__()
        self.first, self.second = make(1), make(2)

    def forward(self, x, caches):
        for layer, cache in zip((self.first, self.second), caches, strict=True):
            x = layer(x, x, x, ch.Causal(), cache=cache)
        return x


def whole(model):
    x = X
    for layer in (model.first, model.second):
        x = layer(x, x, x, ch.Causal())
    return x


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("change", ["nothing", "reorder", "crop"])
def test_one_cache_for_two_layers_is_refused(grad, change):
    first, second, cache = make(1), make(2), KeyValueCache()
    with torch.set_grad_enabled(grad):
        first(X, X, X, ch.Causal(), cache=cache)
        if change == "reorder":
            cache.reorder(torch.tensor([1, 0]))
        elif change == "crop":
            cache.crop([2, 3])
        before = cache.lengths
        with pytest.raises(ch.ClearheadError, match="for each layer"):
            second(X, X, X, ch.Causal(), cache=cache)
        assert cache.lengths == before
        first(X, X, X, ch.Causal(), cache=cache)
        cache.reset()
        second(X, X, X, ch.Causal(), cache=cache)
        assert cache.lengths == (6, 6)


def test_one_cache_for_the_layers_of_compiled_code_is_refused():
    model = Layers()
    with torch.no_grad():
        compiled, cache = torch.compile(model, backend="eager"), KeyValueCache()
        with pytest.raises(ch.ClearheadError, match="for each layer"):
            compiled(X, [cache, cache])
        caches = [KeyValueCache(), KeyValueCache()]
        compiled(X[:, :4], caches), compiled(X[:, 4:], caches)
        assert [cache.lengths for cache in caches] == [(6, 6)] * 2
        with pytest.raises(ch.ClearheadError, match="for each layer"):
            compiled(X[:, :1], caches[::-1])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("grad", [False, True])
def test_copies_of_caches_and_modules_go_on(copied, grad):
    model, caches = Layers(), [KeyValueCache(), KeyValueCache()]
    with torch.set_grad_enabled(grad):
        want = whole(model)
        begun = decoded(model, caches, X[:, :3])
        if copied is copy.copy:
            others, other = [copied(cache) for cache in caches], model
        elif grad:  # keys with a graph can't be pickled, nor can a copy be made of them
            others, other = copy.deepcopy((caches, model))
        else:
            others, other = copied((caches, model))
        for each, kept in ((other, others), (model, caches)):
            rest = decoded(each, kept, X[:, 3:])
            torch.testing.assert_close(torch.cat([begun, rest], 1), want)
            assert [cache.lengths for cache in kept] == [(6, 6)] * 2
        if copied is copy.copy:
            with pytest.raises(ch.ClearheadError, match="for each layer"):
                model(X[:, :1], others[::-1])


def decoded(model, caches, x):
    return torch.cat([model(part, caches) for part in x.split(1, 1)], 1)


def test_a_checkpointed_module_and_a_functional_call():
    model, caches = Layers(), [KeyValueCache(), KeyValueCache()]
    parts = []
    for part in X.split(1, 1):
        run = lambda x: torch.func.functional_call(model, dict(model.named_parameters()), (x, caches))
        with torch.no_grad():
            parts.append(checkpoint(run, part, use_reentrant=False))
    torch.testing.assert_close(torch.cat(parts, 1), whole(model))


def test_a_module_called_twice_with_one_cache_sees_the_keys_of_both_calls():
    """Tied weights: the cache cannot know the calls apart, so each needs its own."""
    module, cache = make(), KeyValueCache()
    with torch.no_grad():
        first = module(X, X, X, ch.Causal(), cache=cache)
        second = module(first, first, first, ch.Causal(), cache=cache)
        both = torch.cat([X, first], 1)
        assert len(cache) == 12
        torch.testing.assert_close(second, module(both, both, both, ch.Causal())[:, 6:])
        apart = [KeyValueCache(), KeyValueCache()]
        steps = []
        for part in X.split(1, 1):
            for cache in apart:
                part = module(part, part, part, ch.Causal(), cache=cache)
            steps.append(part)
        torch.testing.assert_close(torch.cat(steps, 1), module(first, first, first, ch.Causal()))


def pickled(given):
    return pickle.loads(pickle.dumps(given))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, lambda cache: pickled(copy.deepcopy(cache))])
def test_a_copy_of_a_cache_is_refused_by_a_layer_with_other_weights(copied):
    first, second, cache = make(1), make(2), KeyValueCache()
    with torch.no_grad():
        want = first(X, X, X, ch.Causal())
        start, rest = X[:, :4], X[:, 4:]
        first(start, start, start, ch.Causal(), cache=cache)
        other, branch = copied(cache), copy.copy(copied(cache))
        for each in (other, branch):
            with pytest.raises(ch.ClearheadError, match="for each layer"):
                second(rest, rest, rest, ch.Causal(), cache=each)
            assert each.lengths == (4, 4)
        torch.testing.assert_close(pickled(first)(rest, rest, rest, ch.Causal(), cache=other), want[:, 4:])
        torch.testing.assert_close(first(rest, rest, rest, ch.Causal(), cache=branch), want[:, 4:])
        other.reset()
        second(rest, rest, rest, ch.Causal(), cache=other)  # an empty cache is any module's


class Turn(nn.Module):
    """A rotary of one's own, with a buffer that each call changes."""

    def __init__(self, speed):
        super().__init__()
        self.speed = nn.Parameter(torch.tensor(speed))
        self.register_buffer("longest", torch.tensor(0))

    def forward(self, x, *, positions):
        self.longest = torch.maximum(self.longest, positions.max())
        angle = positions[:, None, :, None] * self.speed
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def as_it_is(x, *, positions):
    return x


PARTS = {
    "base": [{"rotary": ch.nn.RotaryEmbedding(4, base=base)} for base in (1e4, 10000.001)],
    "dim": [{"rotary": ch.nn.RotaryEmbedding(dim)} for dim in (4, 2)],
    "interleaved": [{"rotary": ch.nn.RotaryEmbedding(4, interleaved=pairs)} for pairs in (False, True)],
    "scaling": [{"rotary": ch.nn.RotaryEmbedding(4, scaling=ch.nn.RotaryScaling.linear(n))} for n in (2, 4)],
    "dynamic": [{"rotary": ch.nn.RotaryEmbedding(4, scaling=ch.nn.RotaryScaling.dynamic(n, 8))} for n in (2, 4)],
    "no rotary": [{"rotary": ch.nn.RotaryEmbedding(4)}, {}],
    "one's own": [{"rotary": Turn(0.5)}, {"rotary": Turn(0.6)}],
    "a function": [{"rotary": as_it_is}, {"rotary": lambda x, *, positions: -x}],
    "norm": [{"key_norm": nn.RMSNorm(4, eps=eps)} for eps in (1e-6, 1e-3)],
}


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("name", PARTS)
def test_a_copy_of_a_cache_is_refused_by_a_layer_that_makes_other_keys_of_the_same_weights(name, copied):
    def build(options):
        torch.manual_seed(1)
        return MultiHeadAttention(16, 4, **copy.deepcopy(options)).eval()

    first, second = map(build, PARTS[name])
    cache, start, rest = KeyValueCache(), X[:, :4], X[:, 4:]
    with torch.no_grad():
        want = first(X, X, X, ch.Causal())
        first(start, start, start, ch.Causal(), cache=cache)
        other = copied(cache)
        with pytest.raises(ch.ClearheadError, match="the keys of another module"):
            second(rest, rest, rest, ch.Causal(), cache=other)
        assert other.lengths == (4, 4)
        twin = copy.deepcopy(first)
        torch.testing.assert_close(twin(rest, rest, rest, ch.Causal(), cache=other), want[:, 4:])


def test_the_number_of_a_copy_is_that_of_another_process():
    """A cache from a file goes to the module in a process whose hashes of texts are others."""
    code = (
        "import torch; from clearhead.nn import *; from clearhead.nn.key_value_cache import hash_key_makers; "
        "m = MultiHeadAttention(8, 2, rotary=RotaryEmbedding(4, scaling=RotaryScaling.linear(2))); "
        "[torch.nn.init.constant_(p, 0.5) for p in m.parameters()]; print(hash_key_makers(m))"
    )
    found = {
        subprocess.check_output([sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    }
    assert len(found) == 1


@pytest.mark.parametrize("seed", range(4))
def test_copies_of_the_caches_of_many_layers_go_to_no_other_layer(seed):
    """Random kinds of layers; the layers' weights differ in one number of W_k or W_v."""
    choose = random.Random(seed)
    layers = [MultiHeadAttention(16, 4, num_kv_heads=choose.choice([1, 2, 4])).eval()]
    for _ in range(3):
        layers.append(copy.deepcopy(layers[0]))
        with torch.no_grad():
            choose.choice([layers[-1].W_k, layers[-1].W_v]).weight[choose.randrange(4), choose.randrange(16)] += 0.5
    caches = [KeyValueCache() for _ in layers]
    with torch.no_grad():
        for layer, cache in zip(layers, caches, strict=True):
            layer(X, X, X, ch.Causal(), cache=cache)
        for place, layer in enumerate(layers):
            for other, cache in enumerate(choose.choice([pickled, copy.deepcopy])(caches)):
                if other == place:
                    layer(X, X, X, ch.Causal(), cache=cache)
                    continue
                with pytest.raises(ch.ClearheadError, match="for each layer"):
                    layer(X, X, X, ch.Causal(), cache=cache)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: MultiHeadAttention(16, 2), "the new keys are \\(2, 2, 6, 8\\)"),
        (lambda: MultiHeadAttention(16, 4, head_dim=3), "the new keys are \\(2, 4, 6, 3\\)"),
        (lambda: make().double(), "torch.float64"),
    ],
)
def test_modules_of_other_heads_and_dtypes(other, words):
    cache, module = KeyValueCache(), other()
    make()(X, X, X, cache=cache)
    x = X.to(module.W_q.weight)
    with pytest.raises(ch.ClearheadError, match=words):
        module(x, x, x, cache=cache)
