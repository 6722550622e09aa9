"""Each mask against its rule in NumPy, and any expression of masks against the same expression of arrays."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead as ch
from clearhead.base.shapes import Sizes
from clearhead.masks import Intervals
from clearhead.masks.base import dense
from clearhead.masks.dense import intervals
from clearhead.problem.problem import make_problem
from clearhead.problem.regions import of_sequence
from clearhead.report._words import Shown
from clearhead.report.allowed import spans_of

QUERIES, KEYS, BATCH = 5, 8, 2
ROW, COLUMN = np.arange(QUERIES)[:, None], np.arange(KEYS)[None, :]


def shape_of(queries=QUERIES, keys=KEYS, batch=BATCH):
    return torch.zeros(batch, queries, 4), torch.zeros(batch, keys, 4)


def check(mask, rule, align="lower_right"):
    got = mask.dense(*shape_of(), align)
    assert got.dtype == torch.bool and got.shape == (BATCH, QUERIES, KEYS)
    np.testing.assert_array_equal(got.numpy(), np.broadcast_to(rule, got.shape))


@pytest.mark.parametrize(("align", "offset"), [("upper_left", 0), ("lower_right", KEYS - QUERIES)])
def test_causal_and_window_by_their_rules(align, offset):
    check(ch.Causal(), COLUMN <= ROW + offset, align)
    window = (COLUMN >= ROW + offset - 2) & (COLUMN <= ROW + offset + 1)
    check(ch.SlidingWindow(before=2, after=1), window, align)


@pytest.mark.parametrize("positions", [[3, 0], [-2, 7], [20, -20]])
def test_positions_of_each_sequence(positions):
    offset = np.array(positions)[:, None, None]
    check(ch.Causal(), ROW[None] + offset >= COLUMN, torch.tensor(positions))
    window = (ROW[None] + offset >= COLUMN) & (ROW[None] + offset - 1 <= COLUMN)
    check(ch.SlidingWindow(before=1), window, np.array(positions))


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
        ch.Causal() | ch.SlidingWindow(before=2, after=2),
        ~ch.Causal(),
        ~ch.Lengths([2, 0]),
    ):
        assert mask.spans(*inputs).plain, mask
    for mask, most in (
        (~ch.SlidingWindow(before=1, after=1), 2),
        (~ch.SlidingWindow(before=1, after=1) & ch.Causal(), 1),
        (ch.Causal() & (ch.SlidingWindow(before=1) | ch.Lengths([1, 1])), 2),
        (ch.SlidingWindow(before=1, after=1) | ch.Lengths([1, 1]) | ~ch.Lengths([5, 5]), 2),
    ):
        spans = mask.spans(*inputs)
        assert spans.residual is None and spans.intervals()[0].shape[-1] == most, mask


def test_few_rows_have_the_hulls_that_they_have_among_many():
    """Few rows are searched one by one, and many by operations on all of them."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(0, 22, (2, 20, 1), generator=generator)
    runs = (torch.arange(21) >= ends[0]) & (torch.arange(21) < ends[1])
    keep = torch.cat([runs, *(torch.rand(10, 21, generator=generator) < share for share in (0.0, 0.1, 0.5, 0.9, 1.0))])
    start, stop, exact = intervals(keep, 21)
    assert not exact and intervals(runs, 21)[2] and intervals(runs[:9], 21)[2]
    for i, row in enumerate(keep):
        one = intervals(row[None], 21)
        assert (one[0].item(), one[1].item()) == (start[i], stop[i]) and one[2] == (row.sum() == stop[i] - start[i])


def combs(keys, step):
    """A mask of as many intervals as there are teeth."""
    mask = ch.Lengths([[0]])
    for key in range(0, keys, step):
        mask = mask | (ch.Lengths([[key + 1]]) & ~ch.Lengths([[key]]))
    return mask


@pytest.mark.parametrize("teeth", [1, 2, 3, 4, 5, 7])
def test_up_to_four_intervals_need_no_residual(teeth):
    mask = combs(2 * teeth, 2)
    spans = mask._resolve(Sizes(1, 1, 1, 2 * teeth))
    assert (spans.residual is None) == (teeth <= 4)
    want = torch.arange(2 * teeth) % 2 == 0
    for each in (mask, ~~mask):
        assert torch.equal(dense(each._resolve(Sizes(1, 1, 1, 2 * teeth)), Sizes(1, 1, 1, 2 * teeth))[0, 0, 0], want)
        for engine in ("native", "tiled"):
            x = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 2 * teeth, 8), torch.randn(1, 1, 2 * teeth, 8)
            dense_one = ch.attention(*x, mask=want[None], engine="reference")
            torch.testing.assert_close(ch.attention(*x, mask=each, engine=engine), dense_one)


SIZES = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 9), st.integers(1, 9))


@st.composite
def leaf(draw, sizes):
    batch, heads, queries, keys = sizes
    kind = draw(
        st.sampled_from(
            [
                "lengths",
                "per query",
                "padding",
                "causal",
                "window",
                "dense",
                "intervals",
                "documents",
                "prefix",
                "where",
                "first",
            ]
        )
    )
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
    if kind == "documents":
        ids = numbers(draw(st.sampled_from([1, batch])), keys) // draw(st.integers(1, 3))
        ids = np.sort(ids) if draw(st.booleans()) else ids
        mine = ids[:, own[:, 0].clip(0, max(keys - 1, 0))] if keys else np.zeros((len(ids), queries))
        rule = (mine[:, :, None] == ids[:, None, :]) & ((own >= 0) & (own < keys))
        return ch.Documents(ids), rule[:, None]
    if kind == "prefix":
        lens = numbers(batch)
        return ch.PrefixLM(lens), (np.arange(keys) <= own) | (np.arange(keys) < lens[:, None, None, None])
    if kind == "where":
        factors = [draw(st.integers(0, 3)) for _ in range(4)]
        fn = lambda *index: sum(f * i for f, i in zip(factors, index, strict=True)) % 3 > 0
        return ch.MaskFunction(fn), fn(*np.ogrid[:batch, :heads, :queries, :keys])
    if kind == "first":
        count = draw(st.integers(0, 11))
        return ch.FirstKeys(count), np.arange(keys) < count
    if kind == "causal":
        return ch.Causal(), np.arange(keys) <= own
    before, after = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    rule = (np.arange(keys) >= own - before) & (np.arange(keys) <= own + after)
    return ch.SlidingWindow(before=before, after=after), rule


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
    sizes = Sizes(*shape, align="lower_right")
    mask, rule = data.draw(expression(shape))
    spans = mask._resolve(sizes)
    rule = np.broadcast_to(rule, shape)
    np.testing.assert_array_equal(dense(spans, sizes).numpy(), rule)
    np.testing.assert_array_equal(mask._compute_matrix(sizes).expand(shape).numpy(), rule)
    start, stop = (edge.unsqueeze(-1).expand(*shape[:3], 1).numpy() for edge in (spans.start, spans.stop))
    inside = (np.arange(shape[3]) >= start) & (np.arange(shape[3]) < stop)
    assert not (rule & ~inside).any(), "something allowed lies outside the spans"
    if spans.residual is None:
        starts, stops = (edge.expand(*shape[:3], -1).numpy() for edge in spans.intervals())
        assert (starts <= stops).all() and (stops[..., :-1] <= starts[..., 1:]).all(), "sorted and disjoint"
        count = [np.diff(row, prepend=0, append=0).clip(0).sum() for row in rule.reshape(-1, shape[3]).astype(int)]
        assert starts.shape[-1] <= max(1, *count), "more columns than a query needs"
        within = (np.arange(shape[3]) >= starts[..., None]) & (np.arange(shape[3]) < stops[..., None])
        np.testing.assert_array_equal(within.any(-2), rule)


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
            ch.attention(query, key, value, mask=mask, align="lower_right", engine=engine),
            want,
            atol=1e-12,
            rtol=1e-12,
        )


class Beyond(ch.extend.Mask):
    """Intervals as they were given."""

    def __init__(self, start, stop):
        self.start, self.stop = start, stop

    def lower(self, sizes):
        return ch.extend.Spans(self.start, self.stop)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_an_interval_of_nothing_lies_anywhere(data):
    """Alone and in expressions: on every engine, and on the page, which indexes tables by edges."""
    shape = data.draw(SIZES)
    (batch, heads, queries, keys), sizes = shape, Sizes(*shape, align="lower_right")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    far = data.draw(st.sampled_from([0, 1, 9, 2**60]))
    rows = [[data.draw(st.sampled_from([1, n])) for n in shape[:3]] for _ in range(2)]
    start, stop = (torch.randint(-far, keys + far + 1, each, generator=generator) for each in rows)
    outside = ((start < 0) | (stop > keys)) & (stop > start)
    if outside.any():  # something is allowed that does not exist, which is an error: here the row allows nothing
        start, stop = torch.where(outside, stop, start), torch.where(outside, start, stop)
    own, j = Beyond(start, stop), torch.arange(keys)
    own_rule = ((j >= start[..., None]) & (j < stop[..., None])).expand(shape)
    causal = ch.Causal()._compute_matrix(sizes).expand(shape)
    joined = (own & ch.Causal(), own_rule & causal), (ch.Causal() | own, own_rule | causal), (~own, ~own_rule)
    query, key = (torch.randn(batch, heads, n, 4, generator=generator).double() for n in (queries, keys))
    for mask, rule in [(own, own_rule), *joined]:
        spans = mask._resolve(sizes)
        assert torch.equal(dense(spans, sizes), rule)
        assert all(bool(((edge >= 0) & (edge <= keys)).all()) for edge in spans.edges())
        want = torch.nan_to_num((query @ key.mT / 2).masked_fill(~rule, -torch.inf).softmax(-1)) @ key
        for engine in ("reference", "tiled", "sdpa"):
            got = ch.attention(query, key, key, mask=mask, align="lower_right", engine=engine)
            torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)
        if spans.plain:
            problem = of_sequence(make_problem(query, key, mask=mask, align="lower_right"), 0, None)
            start, stop = map(torch.from_numpy, spans_of(problem, *(Shown(None, n, "") for n in (queries, keys))))
            assert torch.equal(((j >= start[..., None]) & (j < stop[..., None])).expand(shape[1:]), rule[0])


@pytest.mark.parametrize(
    "gaps", [([1, 2], [4, 5]), ([1, 4], [3, 2])], ids=["that overlap", "that end before they begin"]
)
def test_gaps_that_are_no_intervals_in_order_are_an_error(gaps):
    """Engines that read the intervals between gaps would see other pairs than those that read the gaps."""

    class Holes(ch.extend.Mask):
        def lower(self, sizes):
            low, high = (torch.tensor(edge).view(1, 1, 1, 2) for edge in gaps)
            start = torch.zeros(1, 1, 1, dtype=torch.int64)
            return ch.extend.Spans(start, start + sizes.keys, gaps=(low, high))

    with pytest.raises(ch.ShapeError, match="gaps that are not sorted and disjoint"):
        ch.attention(*torch.randn(3, 1, 6, 4), mask=Holes())


SINKS = ch.Causal() & (ch.SlidingWindow(before=1) | ch.FirstKeys(3))


def with_sinks(x):
    """Each query over its own key, the key before it and keys 0, 1 and 2, in plain PyTorch."""
    i, j = torch.arange(x.shape[-2])[:, None], torch.arange(x.shape[-2])
    scores = (x @ x.mT / 2).masked_fill((j > i) | ((i - j > 1) & (j > 2)), -torch.inf)
    return scores.softmax(-1) @ x


@pytest.mark.parametrize("engine", ["reference", "tiled", "sdpa", "native"])
@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_first_keys_of_texts_of_any_length(length, engine):
    x = torch.randn(2, 1, length, 4, generator=torch.Generator().manual_seed(length))
    torch.testing.assert_close(ch.attention(x, x, x, mask=SINKS, engine=engine), with_sinks(x))


def test_documents_are_packed_sequences_computed_alone():
    lengths = [4, 1, 0, 7]
    mask = ch.Documents.from_lengths(lengths)
    query, key, value = (torch.randn(2, 12, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    packed = ch.attention(query, key, value, mask=mask & ch.Causal())
    parts = zip(*(t.split(lengths, 1) for t in (query, key, value)), strict=True)
    apart = torch.cat([ch.attention(*part, mask=ch.Causal()) for part in parts], 1)
    torch.testing.assert_close(packed, apart)
    assert (
        mask.spans(query, key).residual is None and ch.plan(query, key, value, mask=mask, engine="sdpa").skipped > 0.5
    )
    assert ch.Documents([]).dense(torch.zeros(0, 4), torch.zeros(0, 4)).shape == (0, 0)
    recurring = ch.Documents([0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 2, 2])
    assert recurring.spans(query, key).residual is not None


def test_positions_of_a_key_value_cache():
    """One query of each of two sequences that have got to 3 and to 7: what ragged decoding needs."""
    at = torch.tensor([3, 7])
    query, key = torch.zeros(2, 1, 4), torch.zeros(2, 9, 4)
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    assert ch.Documents(ids).dense(query, key, at).sum(-1).flatten().tolist() == [4, 5]
    assert ch.PrefixLM([6, 6]).dense(query, key, at).sum(-1).flatten().tolist() == [6, 8]
    assert ch.Documents(ids).dense(query, key, torch.tensor([-1, 9])).sum() == 0
    bias = ch.ALiBi(1)(query, key, at)
    assert (bias[0, 0].argmax(), bias[1, 0].argmax()) == (3, 7) and bias.max() == 0


def test_repr_draws_the_mask():
    assert repr(ch.Causal()).splitlines()[:3] == ["Causal()", "■ · · · · ·", "■ ■ · · · ·"]
    assert repr(ch.Lengths([1, 2])) == "Lengths([1, 2])\nbatch 0\n■ ·\nbatch 1\n■ ■"
    large = repr(ch.DenseMask(torch.ones(3000, 3000, dtype=torch.bool).tril()))
    assert len(large.splitlines()) < 20 and "▪" in large and "first 1024 of 3000" in large
    assert repr(ch.Causal() & (ch.Lengths([3]) | ~ch.SlidingWindow(before=1))).startswith(
        "Causal() & (Lengths([3]) | ~SlidingWindow(before=1))\n"
    )
    assert repr(ch.Lengths([0])) == "Lengths([0])\n·"


def test_documents_by_position_ids():
    made = ch.Documents.from_position_ids
    ids = torch.tensor([[0, 1, 2, 0, 1], [5, 6, 2, 4, 0]])  # from any number on, and with a gap
    assert made(ids).ids.tolist() == [[0, 0, 0, 1, 1], [0, 0, 1, 1, 2]]
    assert made([3]).ids.tolist() == [0] and made(torch.zeros(0, dtype=torch.int32)).ids.tolist() == []
    assert torch.equal(made(ids.int().numpy()).ids, made(ids).ids)
    whole = [[0, 200, 100, 255, 255], [-128, 127, 3, 5, -100]]  # differences that fit no uint8, and no int8
    for row, dtype in zip(whole, (torch.uint8, torch.int8), strict=True):
        begins = [0, *(int(after <= before) for before, after in itertools.pairwise(row))]
        assert made(torch.tensor(row, dtype=dtype)).ids.tolist() == list(itertools.accumulate(begins)), dtype
    for wrong in (ids.float(), ids.bool(), ids[None]):
        with pytest.raises(ch.ClearheadError, match=r"Documents: position_ids has dtype .*expected integers \(Lk,\)"):
            made(wrong)


ADDITIVE = torch.zeros(6, 6, dtype=torch.int64).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -(10**9))
TAKE_MASKS = {
    "attention": lambda mask: ch.attention(*[torch.ones(6, 8)] * 3, mask=mask),
    "beside lengths": lambda mask: ch.attention(*[torch.ones(6, 8)] * 3, mask=mask, valid_lens=[6]),
    "a module": lambda mask: ch.nn.MultiHeadAttention(8, 2)(*[torch.ones(1, 6, 8)] * 3, mask=mask),
    "DenseMask": ch.DenseMask,
    "Padding": ch.Padding,
    "&": lambda mask: ch.Causal() & mask,
    "| on the left": lambda mask: mask | ch.Causal(),
}


@pytest.mark.parametrize("take", TAKE_MASKS)
def test_integers_that_are_meant_to_be_added(take):
    """The advice for 0 and 1, `mask.bool()`, would turn such a mask upside down."""
    for mask, cast in (
        (ADDITIVE, ".float()"), (ADDITIVE.int() // 10**6, ".float()"), (ADDITIVE.numpy(), ".astype(query.dtype)"),
    ):  # fmt: skip
        with pytest.raises(ch.ClearheadError, match="an additive mask") as error:
            TAKE_MASKS[take](mask)
        assert cast in str(error.value) and "bool" not in str(error.value), str(error.value)
        assert len(str(error.value).splitlines()) <= 3
    full = (ADDITIVE == 0).byte() * 255
    others = [ADDITIVE // 10**7, ADDITIVE - 1, torch.zeros(6, 6, dtype=torch.int64)]  # -100; none is 0; all are 0
    for other in (*others, full, full.numpy(), (full // 2).char()):
        if take != "Padding" or (other < 0).any():  # Padding takes the numbers of packed texts
            with pytest.raises(ch.ClearheadError) as error:
                TAKE_MASKS[take](other)
            assert "additive" not in str(error.value)
    spelled = "astype(bool)" if take not in ("attention", "beside lengths", "a module") else "DenseMask(mask"
    with pytest.raises(ch.ClearheadError) as error:
        TAKE_MASKS[take](np.full((6, 6), -2))
    assert spelled in str(error.value)
