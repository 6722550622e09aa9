"""Each mask against its rule in NumPy, and any expression of masks against the same expression of arrays."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead as ch
from clearhead._shapes import Sizes
from clearhead.masks import Intervals
from clearhead.masks.base import dense

QUERIES, KEYS, BATCH = 5, 8, 2
ROW, COLUMN = np.arange(QUERIES)[:, None], np.arange(KEYS)[None, :]


def shape_of(queries=QUERIES, keys=KEYS, batch=BATCH):
    return torch.zeros(batch, queries, 4), torch.zeros(batch, keys, 4)


def check(mask, rule):
    got = mask.dense(*shape_of())
    assert got.dtype == torch.bool and got.shape == (BATCH, QUERIES, KEYS)
    np.testing.assert_array_equal(got.numpy(), np.broadcast_to(rule, got.shape))


@pytest.mark.parametrize(("align", "offset"), [("upper_left", 0), ("lower_right", KEYS - QUERIES)])
def test_causal_and_window_by_their_rules(align, offset):
    check(ch.Causal(align), COLUMN <= ROW + offset)
    window = (COLUMN >= ROW + offset - 2) & (COLUMN <= ROW + offset + 1)
    check(ch.SlidingWindow(2, 1, align), window)


@pytest.mark.parametrize("positions", [[3, 0], [-2, 7], [20, -20]])
def test_positions_of_each_sequence(positions):
    offset = np.array(positions)[:, None, None]
    check(ch.Causal(torch.tensor(positions)), ROW[None] + offset >= COLUMN)
    check(
        ch.SlidingWindow(1, 0, np.array(positions)), (ROW[None] + offset >= COLUMN) & (ROW[None] + offset - 1 <= COLUMN)
    )


def test_lengths_and_padding_by_their_rules():
    check(ch.Lengths([3, 8]), COLUMN[None] < np.array([3, 8])[:, None, None])
    rows = np.arange(10).reshape(2, 5) % 9
    check(ch.Lengths(rows), COLUMN[None] < rows[:, :, None])
    for keep in ([[1] * 5 + [0] * 3, [0] * 8], [[0, 0, 1, 1, 1, 1, 1, 1], [1, 0, 1, 0, 1, 0, 1, 0]]):
        check(ch.Padding(np.array(keep)), np.array(keep, bool)[:, None, :])
        check(ch.Padding(torch.tensor(keep).bool()), np.array(keep, bool)[:, None, :])


def test_right_and_left_padding_are_spans_and_holes_are_not():
    inputs = shape_of()
    right, left, holes = ([1] * 5 + [0] * 3), ([0] * 3 + [1] * 5), ([1, 0] * 4)
    assert ch.Padding(torch.tensor([right, left])).spans(*inputs).residual is None
    assert ch.Padding(torch.tensor([right, holes])).spans(*inputs).residual is not None


def test_a_dense_mask_of_intervals_has_no_residual():
    inputs = shape_of(6, 6)
    assert ch.DenseMask(torch.ones(6, 6, dtype=torch.bool).tril()).spans(*inputs).residual is None
    assert ch.DenseMask(torch.eye(6, dtype=torch.bool) | (torch.arange(6) == 0)).spans(*inputs).residual is not None


def test_what_and_or_and_not_keep_as_spans():
    inputs = shape_of(6, 6)
    for mask in (
        ch.Causal() & ch.Lengths([3, 6]),
        ch.Causal() | ch.SlidingWindow(2, 2),
        ~ch.Causal(),
        ~ch.Lengths([2, 0]),
    ):
        assert mask.spans(*inputs).residual is None, mask
    for mask in (~ch.SlidingWindow(1, 1), ~ch.SlidingWindow(1, 1) & ch.Causal()):
        assert mask.spans(*inputs).residual is not None, mask


SIZES = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 9), st.integers(1, 9))


@st.composite
def leaf(draw, sizes):
    batch, heads, queries, keys = sizes
    kind = draw(st.sampled_from(["lengths", "per query", "padding", "causal", "window", "dense", "intervals"]))
    numbers = lambda *shape: np.array(
        draw(st.lists(st.integers(0, keys), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    ).reshape(shape)
    if kind == "lengths":
        lens = numbers(batch)
        return ch.Lengths(lens), np.arange(keys) < lens[:, None, None, None]
    if kind == "per query":
        lens = numbers(batch, queries)
        return ch.Lengths(lens), np.arange(keys) < lens[:, None, :, None]
    if kind == "padding":
        keep = numbers(batch, keys) % 2
        return ch.Padding(keep), (keep > 0)[:, None, None, :]
    if kind == "dense":
        keep = numbers(draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), queries, keys) % 2 > 0
        return ch.DenseMask(keep), keep
    if kind == "intervals":
        a, b = numbers(queries), numbers(queries)
        return Intervals(a, b), (np.arange(keys) >= a[:, None]) & (np.arange(keys) < b[:, None])
    own = np.arange(queries)[:, None] + keys - queries
    if kind == "causal":
        return ch.Causal("lower_right"), np.arange(keys) <= own
    before, after = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    rule = (np.arange(keys) >= own - before) & (np.arange(keys) <= own + after)
    return ch.SlidingWindow(before, after, "lower_right"), rule


@st.composite
def expression(draw, sizes, depth=3):
    if depth == 0 or draw(st.booleans()):
        return draw(leaf(sizes))
    if draw(st.integers(0, 2)) == 0:
        mask, rule = draw(expression(sizes, depth - 1))
        return ~mask, ~rule
    (a, x), (b, y) = draw(expression(sizes, depth - 1)), draw(expression(sizes, depth - 1))
    return (a & b, x & y) if draw(st.booleans()) else (a | b, x | y)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_expression_is_what_its_parts_say(data):
    shape = data.draw(SIZES)
    sizes = Sizes(*shape)
    mask, rule = data.draw(expression(shape))
    spans = mask.resolve(sizes)
    rule = np.broadcast_to(rule, shape)
    np.testing.assert_array_equal(dense(spans, sizes).numpy(), rule)
    start, stop = (edge.unsqueeze(-1).expand(*shape[:3], 1).numpy() for edge in (spans.start, spans.stop))
    inside = (np.arange(shape[3]) >= start) & (np.arange(shape[3]) < stop)
    assert not (rule & ~inside).any(), "something allowed lies outside the spans"
    if spans.residual is None:
        np.testing.assert_array_equal(inside, rule)


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_any_expression_on_every_engine(data):
    shape = data.draw(SIZES)
    mask, rule = data.draw(expression(shape))
    batch, heads, queries, keys = shape
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(batch, heads, n, 4, generator=generator).double() for n in (queries, keys, keys))
    scores = (query @ key.transpose(-1, -2) / 2).masked_fill(
        ~torch.from_numpy(np.array(np.broadcast_to(rule, shape))), -torch.inf
    )
    want = torch.nan_to_num(scores.softmax(-1)) @ value
    for engine in ("reference", "tiled", "sdpa"):
        torch.testing.assert_close(
            ch.attention(query, key, value, mask=mask, engine=engine), want, atol=1e-12, rtol=1e-12
        )


def test_repr_draws_the_mask():
    assert repr(ch.Causal()).splitlines()[:3] == ["Causal()", "■ · · · · ·", "■ ■ · · · ·"]
    assert repr(ch.Lengths([1, 2])) == "Lengths([1, 2])\nbatch 0\n■ ·\nbatch 1\n■ ■"
    large = repr(ch.DenseMask(torch.ones(3000, 3000, dtype=torch.bool).tril()))
    assert len(large.splitlines()) < 20 and "▪" in large and "first 1024 of 3000" in large
    assert repr(ch.Causal() & (ch.Lengths([3]) | ~ch.SlidingWindow(1))).startswith(
        "Causal() & (Lengths([3]) | ~SlidingWindow(before=1))\n"
    )
    assert repr(ch.Lengths([0])) == "Lengths([0])\n·"
