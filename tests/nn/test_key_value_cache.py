"""Decoding with a cache is the whole sequence at once; what was given out is never written again."""

import copy

import pytest
import torch

import clearhead as ch
from clearhead.nn import KeyValueCache, MultiHeadAttention, RotaryEmbedding

MODULES = {
    "plain": {},
    "rotary": {"rotary": RotaryEmbedding(4)},
    "groups": {"num_key_heads": 2},
    "rotary and groups": {"rotary": RotaryEmbedding(2, interleaved=True), "num_key_heads": 1, "dim_k": 6},
    "another score": {"score": ch.Gaussian()},
}


def make(name="plain"):
    torch.manual_seed(0)
    return MultiHeadAttention(4, 16, **MODULES[name]).eval()


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


def test_gradients_flow_through_the_cache():
    attend, x = make("rotary"), torch.randn(2, 6, 16, requires_grad=True)
    decode(attend, x, KeyValueCache(), [3, 1, 1, 1]).square().sum().backward()
    gradient, x.grad = x.grad, None
    weights = attend.W_k.weight.grad.clone()
    attend.zero_grad()
    attend(x, x, x, ch.Causal()).square().sum().backward()
    torch.testing.assert_close(gradient, x.grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(weights, attend.W_k.weight.grad, atol=1e-4, rtol=1e-4)


def test_room_doubles_and_is_filled_in_place():
    cache, rooms = KeyValueCache(), []
    with torch.no_grad():
        for _ in range(100):
            key, _ = cache.append(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 3))
            rooms.append(key.untyped_storage().data_ptr())
    assert len(set(rooms)) == 4  # room for 16, 32, 64, 128
    assert key.shape == (1, 2, 100, 4)


def test_what_was_given_out_stays():
    cache, given = KeyValueCache(), []
    with torch.no_grad():
        for _ in range(20):
            given.append(cache.append(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)))
    key, value = given[-1]
    for i, (earlier_key, earlier_value) in enumerate(given):
        assert torch.equal(earlier_key, key[:, :, : 3 * i + 3]) and torch.equal(earlier_value, value[:, :, : 3 * i + 3])


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


def test_repr():
    cache = KeyValueCache()
    assert repr(cache) == "KeyValueCache(empty)" and len(cache) == 0
    cache.append(torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, 5))
    assert repr(cache) == "KeyValueCache(length=4, batch=2, heads=3)"
