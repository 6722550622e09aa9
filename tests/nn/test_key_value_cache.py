"""Decoding with a cache is the whole sequence at once; what was given out is never written again."""

import copy

import pytest
import torch

import clearhead as ch
from clearhead.nn import KeyValueCache, MultiHeadAttention, RotaryEmbedding

MODULES = {
    "plain": {},
    "rotary": {"rotary": RotaryEmbedding(4)},
    "groups": {"num_kv_heads": 2},
    "rotary and groups": {"rotary": RotaryEmbedding(2, interleaved=True), "num_kv_heads": 1, "head_dim": 6},
    "another score": {"score": ch.Gaussian()},
}


def make(name="plain"):
    torch.manual_seed(0)
    return MultiHeadAttention(16, 4, **MODULES[name]).eval()


def decode(attend, x, cache, steps):
    parts = x.split(steps, 1)
    return torch.cat([attend(part, part, part, ch.Causal(), cache=cache) for part in parts], 1)


@pytest.mark.parametrize(
    "steps", [[1] * 40, [10, *[1] * 30], [16, 16, 7, 1], [40]], ids=["ones", "prompt", "parts", "all"]
)
@pytest.mark.parametrize("grad", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("name", MODULES)
def test_decoding_is_the_whole_at_once(name, grad, steps):
    attend, x, cache = make(name), torch.randn(3, 40, 16), KeyValueCache()
    with torch.set_grad_enabled(grad):
        output = decode(attend, x, cache, steps)
        whole = attend(x, x, x, ch.Causal())
    torch.testing.assert_close(output, whole, atol=1e-5, rtol=1e-5)
    assert len(cache) == 40 and output.requires_grad == grad


@pytest.mark.parametrize("trained", [["W_q", "W_k"], ["W_q"]], ids=str)
def test_gradients_flow_through_the_cache(trained):
    """Keys without gradients are written in place, and saved for the backward passes of all steps."""
    attend, x = make("rotary").requires_grad_(False), torch.randn(2, 36, 16, requires_grad="W_k" in trained)
    wanted = [getattr(attend, name).requires_grad_(True).weight for name in trained] + [x] * x.requires_grad
    outputs = decode(attend, x, KeyValueCache(), [3, *[1] * 33]), attend(x, x, x, ch.Causal())
    found, expected = (torch.autograd.grad(output.square().sum(), wanted) for output in outputs)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_memory_doubles_and_is_filled_in_place(mode):
    """Keys without gradients, whatever the mode is; the cache was begun in another one. What was given out stays."""
    cache = KeyValueCache()
    with torch.no_grad():
        cache.append(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 3))
    with mode():
        given = [cache.append(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 3)) for _ in range(99)]
    assert len({key.untyped_storage().data_ptr() for key, _ in given}) == 4  # room for 16, 32, 64, 128
    assert given[-1][0].shape == (1, 2, 100, 4)
    for both in given:
        assert all(torch.equal(old, new[:, :, : old.shape[2]]) for old, new in zip(both, given[-1], strict=True))


def test_keys_that_require_grad_are_kept_in_the_graph_after_others():
    cache, key = KeyValueCache(), torch.randn(1, 1, 2, 4, requires_grad=True)
    with torch.no_grad():
        first, _ = cache.append(key, key)
    cache.append(2 * key, key)[0][:, :, 1:].sum().backward()
    assert torch.equal(key.grad, torch.full_like(key, 2)) and torch.equal(first, key)


def test_modes_may_change_between_steps():
    attend, x, cache, parts = make(), torch.randn(2, 8, 16), KeyValueCache(), []
    for i, mode in enumerate([torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode] * 2):
        with mode():
            token = x[:, i : i + 1].clone()
            parts.append(attend(token, token, token, ch.Causal(), cache=cache).clone())
    with torch.inference_mode():
        torch.testing.assert_close(torch.cat(parts, 1), attend(x, x, x, ch.Causal()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fork", [copy.copy, copy.deepcopy])
def test_a_copy_is_a_branch(fork):
    attend, x, y = make(), torch.randn(1, 6, 16), torch.randn(1, 3, 16)
    with torch.no_grad():
        cache = KeyValueCache()
        first = decode(attend, x[:, :4], cache, [1] * 4)
        other = fork(cache)
        one, two = decode(attend, x[:, 4:], cache, [1, 1]), decode(attend, y, other, [1, 1, 1])
        whole, branch = (attend(t, t, t, ch.Causal()) for t in (x, torch.cat([x[:, :4], y], 1)))
    torch.testing.assert_close(torch.cat([first, one], 1), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(two, branch[:, 4:], atol=1e-5, rtol=1e-5)
    assert (len(cache), len(other)) == (6, 7)


@pytest.mark.parametrize("grad", [False, True])
def test_a_refused_call_leaves_the_cache_as_it_was(grad):
    attend, x, cache = make(), torch.randn(2, 5, 16), KeyValueCache()
    with torch.set_grad_enabled(grad):
        first = decode(attend, x[:, :3], cache, [3])
        wrong = torch.full((2, 1, 16), 99.0)
        for mask in (ch.Lengths([1, 2, 3]), torch.ones(1, 9).bool()):
            with pytest.raises(ch.ClearheadError):
                attend(wrong, wrong, wrong, mask, cache=cache)
        assert len(cache) == 3
        rest = decode(attend, x[:, 3:], cache, [1, 1])
        whole = attend(x, x, x, ch.Causal())
    torch.testing.assert_close(torch.cat([first, rest], 1), whole, atol=1e-5, rtol=1e-5)


def test_masks_count_the_cached_keys():
    attend, x, cache = make(), torch.randn(2, 6, 16), KeyValueCache()
    keep = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])  # padded on the left
    with torch.no_grad():
        decode(attend, x[:, :4], cache, [4])
        token = x[:, 4:]
        output = attend(token, token, token, ch.Causal() & ch.Padding(keep), cache=cache)
        cache = KeyValueCache()
        decode(attend, x[:, :4], cache, [4])
        raw = torch.ones(2, 6).tril(4).bool() & keep.bool()[:, None]  # (B, Lq, Lk)
        torch.testing.assert_close(attend(token, token, token, raw, cache=cache), output, atol=1e-6, rtol=1e-6)
        whole = attend(x, x, x, ch.Causal() & ch.Padding(keep))
    torch.testing.assert_close(output, whole[:, 4:], atol=1e-5, rtol=1e-5)


def beams(attend, x, cache, choices):
    """Decode, choosing among the batch after each step."""
    outputs = []
    for token, chosen in zip(x.split(1, 1), choices, strict=True):
        outputs.append(attend(token, token, token, ch.Causal(), cache=cache))
        cache.reorder(torch.tensor(chosen))
    return outputs


@pytest.mark.parametrize("grad", [False, True], ids=["no gradients", "gradients"])
def test_reordering_is_decoding_each_history_by_itself(grad):
    attend, x, cache = make("rotary"), torch.randn(3, 5, 16), KeyValueCache()
    choices = [[0, 1, 2], [2, 2, 0], [1, 0, 0], [0, 1, 2], [2, 1, 0]]
    history = torch.empty(3, 0, 16)
    with torch.set_grad_enabled(grad):
        for i, output in enumerate(beams(attend, x, cache, choices)):
            history = torch.cat([history, x[:, i : i + 1]], 1)  # what each entry has seen until now
            expected = attend(history, history, history, ch.Causal())[:, -1:]
            torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
            history = history[choices[i]]
    assert len(cache) == 5


def test_reordering_changes_the_batch_and_nothing_given_out():
    cache = KeyValueCache()
    with torch.no_grad():
        key, value = cache.append(torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 5))
        before = key.clone(), value.clone()
        branch = copy.copy(cache)
        cache.reorder(torch.tensor([1, 1, 0], dtype=torch.int32))
        assert repr(cache) == "KeyValueCache(length=3, batch=3, heads=2)" and "batch=2" in repr(branch)
        new, _ = cache.append(torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 5))
        branch.append(torch.ones(2, 2, 1, 4), torch.ones(2, 2, 1, 5))
        assert torch.equal(new[:, :, :3], before[0][[1, 1, 0]])
        cache.reorder(torch.tensor([], dtype=torch.long))
        assert "batch=0" in repr(cache)
    assert torch.equal(key, before[0]) and torch.equal(value, before[1])


def test_gradients_flow_through_reordering():
    cache, key = KeyValueCache(), torch.randn(2, 1, 3, 4, requires_grad=True)
    cache.append(key, key)
    cache.reorder(torch.tensor([1, 1]))
    cache.append(torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 1, 4))[0].sum().backward()
    assert torch.equal(key.grad, torch.tensor([0.0, 2.0]).view(2, 1, 1, 1).expand_as(key))


@pytest.mark.parametrize("grad", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("name", ["plain", "rotary"])
def test_cropping_takes_positions_back(name, grad):
    attend, x, y = make(name), torch.randn(2, 9, 16), torch.randn(2, 4, 16)
    cache = KeyValueCache()
    with torch.set_grad_enabled(grad):
        first = decode(attend, x, cache, [5, 1, 1, 1, 1])
        weights = attend.attention_weights
        branch = copy.copy(cache)
        cache.crop(6)
        assert len(cache) == 6 and len(branch) == 9
        second = decode(attend, y, cache, [2, 2])
        third = decode(attend, y, branch, [1, 3])
        for tokens, outputs in (([x[:, :6], y], [first[:, :6], second]), ([x, y], [first, third])):
            whole = torch.cat(tokens, 1)
            expected = attend(whole, whole, whole, ch.Causal())
            torch.testing.assert_close(torch.cat(outputs, 1), expected, atol=1e-5, rtol=1e-5)
        attend(x, x, x, ch.Causal())
        last = attend.attention_weights.dense()[:, :, -1:]
        torch.testing.assert_close(weights.dense(), last, atol=1e-6, rtol=1e-5)  # looked at after others were written
    cache.crop(len(cache))
    assert len(cache) == 10
    cache.crop(0)
    assert len(cache) == 0 and "batch=2" in repr(cache)


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")  # the module's record
@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
def test_a_cache_that_is_made_in_exported_code(strict):
    class Decoding(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = make()

        def forward(self, x):
            cache = KeyValueCache()
            steps = [self.attend(part, part, part, ch.Causal(), cache=cache) for part in x.split([2, 1], 1)]
            return torch.cat(steps, 1)

    model, x = Decoding(), torch.randn(1, 3, 16)
    with torch.no_grad():
        found = torch.export.export(model, (x,), strict=strict).module()(x)
        torch.testing.assert_close(found, model.attend(x, x, x, ch.Causal()))


def test_reset():
    attend, cache = make(), KeyValueCache()
    with torch.no_grad():
        decode(attend, torch.randn(2, 3, 16), cache, [3])
        branch = copy.copy(cache)
        cache.reset()
        assert repr(cache) == "KeyValueCache(empty)" and len(branch) == 3
        x = torch.randn(5, 3, 16)
        torch.testing.assert_close(decode(attend, x, cache, [3]), attend(x, x, x, ch.Causal()))
    cache.crop(3)
    KeyValueCache().crop(0)
    KeyValueCache().reset()


WRONG = {
    "a list": (lambda c: c.reorder([0, 1]), ["indices is a list", "torch.tensor"]),
    "floats": (lambda c: c.reorder(torch.tensor([0.0])), ["float32", "integers (N,)"]),
    "an empty cache": (lambda c: KeyValueCache().reorder(torch.tensor([0])), ["empty", "no batch"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused_leaves_it_as_it_was(name):
    call, says = WRONG[name]
    cache = KeyValueCache()
    cache.append(torch.zeros(2, 1, 4, 3), torch.zeros(2, 1, 4, 3))
    with pytest.raises(ch.ClearheadError) as caught:
        call(cache)
    assert all(word in str(caught.value) for word in says), caught.value
    assert repr(cache) == "KeyValueCache(length=4, batch=2, heads=1)"
