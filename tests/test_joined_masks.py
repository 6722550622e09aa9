"""Expressions that use a mask more than once, and expressions of many masks."""

import random
import weakref

import pytest
import torch
from drawn import draw

import clearhead as ch
from clearhead.base.symbolic.fold import fold
from clearhead.nn import KeyValueCache, MultiHeadAttention


class Counted(ch.extend.Mask):
    """A mask with a residual, which counts how often it is lowered and how often its residual is asked."""

    def __init__(self):
        self.lowered = self.asked = 0

    def lower(self, sizes):
        def residual(batch, heads, queries, keys):
            self.asked += 1
            rows, columns = (torch.arange(n)[side] for n, side in zip(sizes.shape[2:], (queries, keys), strict=True))
            return (rows[:, None] * 3 + columns * 5) % 4 != 0

        self.lowered += 1
        start = torch.zeros(1, 1, 1, dtype=torch.int64)
        return ch.extend.Spans(start, start + sizes.keys, residual)


def doubled(mask, levels):
    for _ in range(levels):
        mask = (mask & ch.SlidingWindow(before=9)) | (mask & ch.FirstKeys(3)) | ~~mask
    return mask


def test_a_mask_that_is_used_twice_is_asked_once():
    x, counted = draw(1, 2, 70, 8), Counted()
    mask = doubled(ch.Causal() & counted, 40)
    want = ch.Causal().dense(70, 70) & counted.dense(70, 70)
    counted.lowered = counted.asked = 0
    found = ch.attention(x, x, x, mask=mask, engine="native")
    assert counted.lowered == 1 and counted.asked == 1
    torch.testing.assert_close(found, ch.attention(x, x, x, mask=want, engine="reference"))
    assert torch.equal(mask.dense(70, 70), want)
    assert len(ch.Causal().__repr__()) < len(repr(mask)) < 4000
    assert len(ch.explain(draw(5, 8), draw(5, 8), draw(5, 8), mask=doubled(ch.Causal(), 9)).steps) < 150
    weights = ch.weights(x, x, mask=mask)
    torch.testing.assert_close(weights[0, 1, 60:], ch.weights(x, x, mask=want)[0, 1, 60:])
    torch.testing.assert_close(weights @ x, found)


@pytest.mark.parametrize("engine", ["native", "tiled", "sdpa", "reference"])
@pytest.mark.parametrize("seed", range(3))
def test_random_expressions_with_shared_parts(seed, engine):
    """The logic of each pair is that of the same operators on matrices."""
    of, x = random.Random(seed), draw(1, 2, 60, 8, seed=seed)
    masks = [ch.Causal(), ch.SlidingWindow(before=5, after=2), ch.FirstKeys(4), Counted(), ch.Lengths([50])]
    masks.append(ch.MaskFunction(lambda b, h, i, j: (i * 3 + j * 5 + h) % 4 != 0))
    pairs = [(mask, mask.dense(x, x)) for mask in masks]
    for _ in range(40):
        (one, of_one), (two, of_two) = of.sample(pairs, 2)
        pairs.append(of.choice([(one & two, of_one & of_two), (one | two, of_one | of_two), (~one, ~of_one)]))
    for mask, keep in pairs[-3:]:
        found = ch.attention(x, x, x, mask=mask, engine=engine)
        torch.testing.assert_close(found, ch.attention(x, x, x, mask=keep, engine="reference"), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("leaf", [ch.FirstKeys(2), Counted(), ch.MaskFunction(lambda b, h, i, j: (i + j) % 3 != 0)])
def test_a_thousand_joined_masks(leaf):
    x, mask = draw(1, 1, 40, 8).requires_grad_(), ch.Causal()
    keep, each = mask.dense(x, x), leaf.dense(x, x)
    for i in range(1000):
        window = ch.SlidingWindow(before=i % 7)
        mask = mask & leaf if i % 3 else mask | ~window
        keep = keep & each if i % 3 else keep | ~window.dense(x, x)
    found, want = (ch.attention(x, x, x, mask=given) for given in (mask, keep))
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), x)[0] for out in (found, want)))
    torch.testing.assert_close(*(ch.weights(x.detach(), x.detach(), mask=given).entropy() for given in (mask, keep)))
    assert mask.title() and repr(mask) and mask._repr_html_() and ch.plan(x, x, x, mask=mask).engine
    assert torch.equal(mask._compute_matrix(ch.extend.Sizes(1, 1, 40, 40)).expand_as(keep), keep)


def test_rules_of_many_masks_beside_a_cache():
    layer, x = MultiHeadAttention(8, 2).eval(), draw(1, 6, 8)
    mask = rule = ch.MaskFunction(lambda b, h, i, j: j <= i)
    for _ in range(200):
        mask = (mask & rule) | (mask & ch.FirstKeys(1))
    cache = KeyValueCache()
    steps = [layer(step, step, step, mask=mask, cache=cache) for step in x.split(1, dim=1)]
    torch.testing.assert_close(torch.cat(steps, 1), layer(x, x, x, mask=ch.Causal()), atol=1e-5, rtol=1e-5)


def test_compiled_code_asks_each_mask_once():
    def attend(x):
        mask = ch.Causal()
        for _ in range(3):
            mask = (mask & ch.SlidingWindow(before=9)) | (mask & ch.FirstKeys(3))
        return ch.attention(x, x, x, mask=mask)

    x = draw(1, 1, 30, 8)
    torch.testing.assert_close(torch.compile(attend, fullgraph=True, backend="eager")(x), attend(x))


def test_a_value_of_a_part_is_held_until_its_last_use():
    class Value:
        def __init__(self, count):
            self.count = count

    inner = {"a": ("b", "c"), "b": ("c", "d"), "c": ("d",), "d": (), "unused": ()}
    alive, found = weakref.WeakValueDictionary(), {}

    def make(part, *values):
        found[part] = sorted(alive)
        alive[part] = value = Value(1 + sum(value.count for value in values))
        return value

    assert fold("a", inner.__getitem__, make).count == 7
    assert found == {"d": [], "c": ["d"], "b": ["c", "d"], "a": ["b", "c"]}
