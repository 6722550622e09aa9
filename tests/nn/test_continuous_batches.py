"""Sequences of unequal lengths in one cache: each is what it would be alone, its whole history at once."""

import copy
import random

import pytest
import torch

import clearhead as ch
from clearhead.nn import KeyValueCache, MultiHeadAttention, RotaryEmbedding

MODULES = {
    "plain": {},
    "rotary": {"rotary": RotaryEmbedding(4)},
    "groups": {"num_kv_heads": 2, "rotary": RotaryEmbedding(2, interleaved=True)},
    "another score": {"score": ch.Gaussian()},
}
MASKS = {
    "causal": ({"mask": ch.Causal()}, True),
    "window": ({"mask": ch.Causal() & ch.SlidingWindow(before=2)}, True),
    "a bias of the distance": ({"mask": ch.Causal(), "bias": ch.ALiBi(4)}, True),
    "none": ({}, False),
}


def make(name="plain"):
    torch.manual_seed(0)
    return MultiHeadAttention(16, 4, **MODULES[name]).eval()


class Batch:
    """A cache, and beside it what each of its sequences has been told."""

    def __init__(self, attend, size, options, causal):
        self.attend, self.options, self.causal = attend, options, causal
        self.cache, self.told = KeyValueCache(), [torch.empty(0, 16)] * size

    def step(self, new, lens):
        """Tell more; compare with each history by itself."""
        given = new.clone()
        for row, length in zip(given, lens, strict=True):
            row[length:] = torch.nan  # padding may hold anything
        output = self.attend(given, given, given, cache=self.cache, new_lens=lens, **self.options)
        self.told = [torch.cat([old, row[:n]]) for old, row, n in zip(self.told, new, lens, strict=True)]
        assert self.cache.lengths == tuple(map(len, self.told))
        for told, row, n in zip(self.told, output, lens, strict=True):
            if n:
                queries = told if self.causal else told[-n:]
                align = "upper_left" if self.causal else "lower_right"
                alone = self.attend(queries, told, told, align=align, **self.options)
                torch.testing.assert_close(row[:n], alone[-n:], atol=2e-5, rtol=1e-4)
        return output


@pytest.mark.parametrize("grad", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", MODULES)
def test_each_sequence_is_what_it_is_alone(name, mask, grad):
    if mask == "none" and MODULES[name].get("rotary"):
        mask = "causal"  # a query by itself would stand at position 0
    draw = random.Random(f"{name} {mask}")
    torch.manual_seed(1)
    batch = Batch(make(name), 3, *MASKS[mask])
    with torch.set_grad_enabled(grad):
        for _ in range(12):
            size = draw.choice([1, 1, 2, 5])
            batch.step(torch.randn(len(batch.told), size, 16), [draw.randint(0, size) for _ in batch.told])
            what = draw.random()
            if what < 0.25:  # some are done, or taken back
                kept = [draw.choice([len(t), len(t) // 2, 0]) for t in batch.told]
                batch.cache.crop(draw.choice([list, torch.tensor])(kept))
                batch.told = [t[:n] for t, n in zip(batch.told, kept, strict=True)]
            elif what < 0.4:
                chosen = [draw.randrange(len(batch.told)) for _ in range(draw.choice([2, 3, 4]))]
                batch.cache.reorder(torch.tensor(chosen))
                batch.told = [batch.told[i] for i in chosen]


def test_after_unequal_prompts_each_step_needs_no_lengths():
    attend, x, cache = make("rotary"), torch.randn(2, 9, 16), KeyValueCache()
    with torch.no_grad():
        prompts = x[:, :5].clone()
        prompts[1, 2:] = 0
        attend(prompts, prompts, prompts, ch.Causal(), cache=cache, new_lens=torch.tensor([5, 2]))
        assert repr(cache) == "KeyValueCache(length=2 to 5, batch=2, heads=4)" and len(cache) == 5
        for i in range(3):
            token = torch.stack([x[0, 5 + i], x[1, 2 + i]])[:, None]
            output = attend(token, token, token, ch.Causal(), cache=cache)
        weights = attend.attention_weights
        for row, length in ((0, 8), (1, 5)):
            whole = attend(*[x[row : row + 1, :length]] * 3, ch.Causal())
            torch.testing.assert_close(output[row], whole[0, -1:], atol=1e-5, rtol=1e-5)
    assert weights.shape == (2, 4, 1, 8) and (weights[1, :, :, 5:] == 0).all()


def test_gradients_are_those_of_each_sequence_alone():
    attend, x = make("rotary"), torch.randn(2, 6, 16, requires_grad=True)
    cache, total = KeyValueCache(), torch.zeros(())
    for part, lens in ((x[:, :4], [4, 2]), (x[:, 4:], [1, 2])):
        output = attend(part, part, part, ch.Causal(), cache=cache, new_lens=lens)
        total = total + sum(row[:n].square().sum() for row, n in zip(output, lens, strict=True))
    found = torch.autograd.grad(total, [x, *attend.parameters()])
    one, two = x[:1, [0, 1, 2, 3, 4]], x[1:, [0, 1, 4, 5]]
    alone = sum(attend(t, t, t, ch.Causal()).square().sum() for t in (one, two))
    for got, want in zip(found, torch.autograd.grad(alone, [x, *attend.parameters()]), strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_a_float_mask_and_lengths_hold_beside_the_caches_own():
    attend, x, cache = make(), torch.randn(2, 6, 16), KeyValueCache()
    added = torch.randn(2, 7)
    with torch.no_grad():
        attend(x[:, :5], x[:, :5], x[:, :5], cache=cache, new_lens=[5, 1])
        output = attend(x[:, :2], x[:, :2], x[:, :2], added, valid_lens=[6, 7], cache=cache, new_lens=[2, 2])
        told = torch.cat([x[1, :1], x[1, :2]])
        alone = attend(x[1, :2], told, told, added[:, :3])
    torch.testing.assert_close(output[1], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("grad", [False, True], ids=["no gradients", "gradients"])
def test_branches_go_on_by_themselves_and_nothing_given_out_changes(grad):
    cache = KeyValueCache()
    with torch.set_grad_enabled(grad):
        key, value = cache.append(torch.ones(2, 1, 4, 2), torch.ones(2, 1, 4, 3), new_lens=[4, 1])
        branch = copy.copy(cache)
        cache.append(torch.full((2, 1, 2, 2), 2.0), torch.full((2, 1, 2, 3), 2.0), [1, 2])
        branch.append(torch.full((2, 1, 3, 2), 3.0), torch.full((2, 1, 3, 3), 3.0), [0, 3])
        assert (cache.lengths, branch.lengths) == ((5, 3), (4, 4))
        none = torch.empty(2, 1, 0, 2), torch.empty(2, 1, 0, 3)
        assert cache.append(*none)[0][:, 0, :, 0].tolist()[1][:3] == [1, 2, 2]
        assert branch.append(*none)[1][1, 0, :, 0].tolist() == [1, 3, 3, 3]
    assert (key[0] == 1).all() and key[1, 0, 0, 0] == 1 and (value[0] == 1).all()


def test_equal_lengths_are_an_ordinary_batch_again():
    cache = KeyValueCache()
    cache.append(torch.ones(2, 1, 4, 2), torch.ones(2, 1, 4, 3), [4, 1])
    cache.crop(1)
    assert cache.lengths == (1, 1) and repr(cache) == "KeyValueCache(length=1, batch=2, heads=1)"
    cache.append(torch.ones(2, 1, 1, 2), torch.ones(2, 1, 1, 3))
    assert cache.lengths == (2, 2) and cache._state.lengths is None
    cache.crop([0, 0])
    assert len(cache) == 0
    assert KeyValueCache().lengths is None


WRONG = {
    "too many": ({"new_lens": [3, 1]}, ["new_lens is (3, 1)", "2 new keys"]),
    "another batch": ({"new_lens": [1, 1, 1]}, ["(3,)", "(2,)"]),
    "two dimensions": ({"new_lens": torch.ones(2, 1).long()}, ["(2, 1)"]),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("grad", [False, True])
def test_wrong_lengths(name, grad):
    options, says = WRONG[name]
    attend, x, cache = make(), torch.randn(2, 2, 16), KeyValueCache()
    with torch.set_grad_enabled(grad):
        attend(x, x, x, ch.Causal(), cache=cache, new_lens=[2, 1])
        with pytest.raises(ch.ClearheadError) as caught:
            attend(x, x, x, ch.Causal(), **{"cache": cache} | options)
        assert all(word in str(caught.value) for word in says), caught.value
        assert cache.lengths == (2, 1)
        for wrong in ([3, 1], [2, 2], [1], [1.0, 1.0], [-1, 0]):
            with pytest.raises(ch.ClearheadError, match=r"length"):
                cache.crop(wrong)
        assert cache.lengths == (2, 1)


def test_compiled_code_says_what_it_cannot():
    attend, x = make(), torch.randn(2, 2, 16)

    def step(x):
        cache = KeyValueCache()
        attend(x, x, x, ch.Causal(), cache=cache, new_lens=[2, 1])
        return attend(x, x, x, ch.Causal(), cache=cache)

    with torch.no_grad(), pytest.raises(Exception, match="is read on the host"):
        torch.compile(step, backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize("grad", [False, True], ids=["no gradients", "gradients"])
def test_reordering_the_longest_away(grad):
    cache = KeyValueCache()
    with torch.set_grad_enabled(grad):
        cache.append(torch.ones(2, 2, 20, 4), torch.ones(2, 2, 20, 4), [20, 3])
        cache.reorder(torch.tensor([1, 1]))
        assert (len(cache), cache.lengths) == (3, (3, 3)) and "length=3," in repr(cache)
        with pytest.raises(ch.ClearheadError, match="holds 3 positions"):
            cache.crop(10)
        key, _ = cache.append(torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4))
    assert key[:, 0, :, 0].tolist() == [[1, 1, 1, 0]] * 2


def test_lengths_of_empty_caches():
    cache = KeyValueCache()
    cache.crop([0, 0]), cache.crop(torch.zeros(3).long())
    with pytest.raises(ch.ClearheadError, match="holds 0 positions"):
        cache.crop([0, 1])
    cache.append(torch.ones(2, 1, 5, 2), torch.ones(2, 1, 5, 2))
    cache.reorder(torch.tensor([], dtype=torch.long))
    cache.crop(2)
    assert cache.lengths == ()


def test_one_query_for_sequences_that_stand_at_unequal_places():
    attend, cache, x = make("rotary"), KeyValueCache(), torch.randn(3, 4, 16)
    with torch.no_grad():
        attend(x, x, x, ch.Causal(), cache=cache)
        cache.crop([2, 4, 1])
        query, new = x[:1, :1], x[:, 3:]
        together = attend(query, new, new, ch.Causal(), cache=copy.copy(cache))
        each = attend(query.expand(3, -1, -1), new, new, ch.Causal(), cache=cache)
    torch.testing.assert_close(together, each)


def test_a_cache_keeps_keys_of_its_own():
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            cache, key = KeyValueCache(), torch.ones(1, 1, 2, 2)
            cache.append(key, key)
            key.zero_()
            assert (cache.append(key, key)[0][:, :, :2] == 1).all()
