"""The map of blocks: what is skipped, when it is made again, and that it says what the mask says."""

import copy
import pickle

import pytest
import torch
from drawn import draw

import clearhead as ch
from clearhead.engines.native import bindings, blocks
from clearhead.masks import Intervals
from clearhead.problem import regions


def rule_of(tensor):
    asked = []

    def rule(batch, head, query, key):
        asked.append(query.shape)
        return tensor[query // 16, key // 16]

    return rule, asked


def truth(x, keep):
    return ch.attention(x, x, x, mask=keep, engine="reference")


@pytest.mark.parametrize("edge", [1, 47, 48, 49, 64, 96, 130, 200])
@pytest.mark.parametrize("engine", ["native", "tiled"])
def test_every_size_forward_and_backward(edge, engine):
    """First keys and a window; every third block; a random half: with gradients, and one row that sees nothing."""
    x = draw(2, 2, edge, 8).requires_grad_()
    i, j = torch.arange(edge)[:, None], torch.arange(edge)
    random = draw(2, 2, edge, edge, seed=3) > 0
    random[:, :, edge // 2] = False
    for mask in (
        ch.Causal() & (ch.SlidingWindow(before=5) | ch.Lengths([min(3, edge), 1])),
        ch.SlidingWindow(before=2, after=2) | ch.Lengths([edge // 4, 1]) | ~ch.Lengths([max(edge - 2, 0), edge]),
        ch.MaskFunction(lambda b, h, q, k: (q // 48 + k // 64 + h) % 3 == 0),
        ch.DenseMask((i // 48 + j // 64) % 2 == 0) & ch.Causal(),
        ch.DenseMask(random),
    ):
        keep = mask.dense(x, x)
        grad = draw(2, 2, edge, 8, seed=1)
        for one, two in zip(
            *(
                (out, torch.autograd.grad(out, x, grad)[0])
                for out in (ch.attention(x, x, x, mask=mask, engine=engine), truth(x, keep))
            ),
            strict=True,
        ):
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


def test_the_share_that_is_skipped():
    x = torch.zeros(1, 2, 960, 8)
    streaming = ch.Causal() & (ch.SlidingWindow(before=63) | ch.Lengths([4]))
    even = ch.MaskFunction(lambda b, h, q, k: (q // 48 + k // 64) % 4 == 0)
    assert ch.plan(x, x, x, mask=even).skipped == pytest.approx(0.75)
    assert ch.plan(x, x, x, mask=streaming).skipped > 0.75
    assert ch.plan(x, x, x, mask=streaming, engine="tiled").skipped > 0.5
    assert ch.plan(x, x, x, mask=ch.MaskFunction(lambda b, h, q, k: q >= 0 * k)).skipped == 0


def test_a_rule_that_says_what_it_reads_is_asked_once():
    allowed = draw(10, 10) > 0
    x = draw(1, 1, 160, 8)
    rule, asked = rule_of(allowed)
    keep = lambda: allowed.repeat_interleave(16, 0).repeat_interleave(16, 1)
    mask = ch.Causal() & ch.MaskFunction(rule, reads=[allowed])
    for _ in range(3):
        torch.testing.assert_close(ch.attention(x, x, x, mask=mask), truth(x, keep().tril()))
    once = len(asked)
    ch.attention(x, x, x, mask=mask)
    assert len(asked) == once
    with torch.inference_mode():
        ch.attention(x, x, x, mask=mask)
    allowed.logical_not_()  # noticed
    torch.testing.assert_close(ch.attention(x, x, x, mask=mask), truth(x, keep().tril()))
    assert len(asked) > once
    smaller = x[:, :, :100]
    torch.testing.assert_close(
        ch.attention(smaller, smaller, smaller, mask=mask), truth(smaller, keep()[:100, :100].tril())
    )
    for again in (copy.deepcopy(ch.DenseMask(keep())), pickle.loads(pickle.dumps(ch.DenseMask(keep())))):
        torch.testing.assert_close(ch.attention(x, x, x, mask=again), truth(x, keep()))


@pytest.mark.parametrize("size", [30, 48, 200])
def test_statistics_of_masks_with_gaps(size, monkeypatch):
    """A map's rows of cells begin anywhere among the blocks."""
    query, key = draw(1, 2, 150, 8), draw(1, 2, size, 8, seed=1)
    mask = ch.SlidingWindow(before=10, after=10) | ch.Lengths([3]) | ch.DenseMask(draw(150, size, seed=2) > 1)
    monkeypatch.setattr(blocks, "STRIP", 48 * size)
    reductions = (
        ch.reductions.Received(),
        ch.reductions.Pool((7, 5)),
        ch.reductions.Pool((9, 3), "mean"),
        ch.reductions.TopK(3),
        ch.reductions.MaxScore(),
        ch.reductions.Entropy(),
    )
    found, want = (
        ch.weights(query.to(t), key.to(t), mask=mask, align=20, engine=engine).reduce(*reductions)
        for t, engine in ((torch.float32, "native"), (torch.float64, "reference"))
    )
    for one, two in zip(found, want, strict=True):
        one, two = (t[0] if isinstance(t, tuple) else t for t in (one, two))
        torch.testing.assert_close(one.double(), two, atol=2e-5, rtol=2e-5)


def test_the_map_is_made_once_for_forward_and_backward():
    x = draw(1, 2, 100, 8).requires_grad_()
    rule, asked = rule_of(torch.ones(7, 7, dtype=torch.bool).tril())
    out = ch.attention(x, x, x, mask=ch.MaskFunction(rule))
    before = len(asked)
    out.sum().backward()
    assert len(asked) == before


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("queries", [1, 3, 130])  # few queries do not pack the keys
def test_random_intervals_of_each_row_and_head(queries, seed):
    """Up to four intervals of each query, which differ in sequences and heads or are the same."""
    keys, shape = 333, (2 - seed % 2, 1 + seed // 3, queries, 8)
    edges = torch.randint(0, keys + 1, shape, generator=torch.Generator().manual_seed(seed)).sort(-1).values
    edges[..., seed % 3 :: 3, 4:] = 0  # fewer intervals in some rows
    start, stop = edges[..., ::2], edges[..., 1::2]
    mask = Intervals(start[..., 0], stop[..., 0])
    for n in range(1, 4):
        mask = mask | Intervals(start[..., n], stop[..., n])
    query, key = draw(2, 2, queries, 8).requires_grad_(), draw(2, 2, keys, 8, seed=1).requires_grad_()
    assert not ch.weights(query, key, mask=mask).problem.visible.spans.plain
    wanted = ch.reductions.Received(), ch.reductions.Entropy(), ch.reductions.Pool((7, 5)), ch.reductions.MaxScore()
    found = []
    for given, engine in ((mask, "native"), (mask.dense(query, key), "reference")):
        out = ch.attention(query, key, key, mask=given, engine=engine)
        statistics = ch.weights(query.detach(), key.detach(), mask=given, engine=engine).reduce(*wanted)
        found.append([out, *torch.autograd.grad(out.square().sum(), (query, key)), *statistics])
    for one, two in zip(*found, strict=True):
        one, two = (t[0] if isinstance(t, tuple) else t for t in (one, two))
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


def test_the_map_of_intervals_grows_with_the_length():
    """It has no bits, and runs of blocks."""
    streaming = ch.Causal() & (ch.SlidingWindow(before=63) | ch.FirstKeys(4))
    found = []
    for length in (2**12, 2**14):
        x = torch.zeros(1, 1, length, 1)
        found.append(blocks.blocks_of(ch.weights(x, x, mask=streaming).problem, bindings.kernels()).bytes)
    assert found[1] < 4.1 * found[0] and found[1] < 2 * 2**14


def test_a_residual_is_asked_for_the_keys_of_its_spans():
    pairs = 0

    class Dilated(ch.extend.Mask):
        positional = True

        def signature(self):
            return (Dilated,)

        def lower(self, sizes):
            def residual(*sides):
                nonlocal pairs
                rows, columns = (torch.arange(n)[side] for n, side in zip(sizes.shape[2:], sides[2:], strict=True))
                pairs += rows.numel() * columns.numel()
                return (rows[:, None] - columns) % 4 == 0

            own = torch.arange(sizes.queries).view(1, 1, -1)
            return ch.extend.Spans((own - 252).clamp(min=0), own + 1, residual)

    x, i = draw(1, 1, 2048, 8), torch.arange(2048)
    far = i[:, None] - i
    keep = (far % 4 == 0) & (far >= 0) & (far <= 252)
    torch.testing.assert_close(ch.attention(x, x, x, mask=Dilated(), engine="native"), truth(x, keep))
    assert pairs < 2048 * 2048 / 2.5
    before = pairs
    ch.attention(x, x, x, mask=Dilated(), engine="native")
    assert pairs == before


def test_a_map_that_would_be_large_is_made_for_some_queries_at_a_time(monkeypatch):
    x = draw(2, 2, 200, 8).requires_grad_()
    mask = ch.MaskFunction(lambda b, h, q, k: (q * 7 + k * 3 + b) % 5 < 2)
    want = truth(x, mask.dense(x, x))
    monkeypatch.setattr(blocks, "KEEP_BYTES", 2 * 2 * 200 * 48 // 8)
    monkeypatch.setattr(regions, "LOOK", 4000)
    out = ch.attention(x, x, x, mask=mask, engine="native")
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    for one, two in zip(*(torch.autograd.grad(o.square().sum(), x) for o in (out, want)), strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)
    assert blocks.rows_at_once(ch.weights(x, x, mask=mask).problem) < 200


def test_bytes_of_a_bool_tensor_that_are_not_1():
    x = draw(1, 2, 100, 8)
    keep = draw(100, 100, seed=1) > 0
    for byte in (2, 128, 255):
        odd = (keep.to(torch.uint8) * byte).view(torch.bool)
        torch.testing.assert_close(ch.attention(x, x, x, mask=odd, engine="native"), truth(x, keep))


def test_a_mask_that_is_changed_is_asked_again():
    x = draw(1, 1, 100, 8)
    places = torch.arange(100)
    third, fifth = ((places[:, None] - places) % n == 0 for n in (3, 5))
    mask = ch.MaskFunction(lambda b, h, q, k: (q - k) % 3 == 0, reads=()) & ch.Causal()
    torch.testing.assert_close(ch.attention(x, x, x, mask=mask), truth(x, third.tril()))
    again = copy.copy(mask)
    again.inner = again.inner[0], ~ch.Causal()
    torch.testing.assert_close(ch.attention(x, x, x, mask=again), truth(x, third.triu(1)))
    torch.testing.assert_close(ch.attention(x, x, x, mask=mask), truth(x, third.tril()))
    mask.inner[0].fn = lambda b, h, q, k: (q - k) % 5 == 0
    torch.testing.assert_close(ch.attention(x, x, x, mask=mask), truth(x, fifth.tril()))
    shared = (draw(100, 100, seed=2) > 0).numpy()
    dense = ch.DenseMask(torch.from_numpy(shared))
    for turn in range(6):
        torch.testing.assert_close(ch.attention(x, x, x, mask=dense), truth(x, torch.from_numpy(shared).clone()))
        if turn % 3 == 2:  # it is kept at the second use
            shared[:] = ~shared

    class Shifted(ch.MaskFunction):
        by = 0

        def lower(self, sizes):
            return ch.SlidingWindow(before=self.by, after=0).lower(sizes)

    class Inherits(Shifted):
        pass

    for kind in (Shifted, Inherits):
        own = kind(lambda b, h, q, k: q >= 0 * k, reads=())
        for own.by in (0, 3, 1):
            want = truth(x, (places[:, None] - places >= 0) & (places[:, None] - places <= own.by))
            torch.testing.assert_close(ch.attention(x, x, x, mask=own, align="upper_left"), want)


def test_a_mask_that_broadcasts_is_one_pass_whatever_the_batch(monkeypatch):
    monkeypatch.setattr(blocks, "KEEP_BYTES", 200 * 200 // 8)
    x = torch.zeros(4, 8, 200, 8)
    for mask in (ch.DenseMask(draw(200, 200) > 0), ch.Causal() & (ch.SlidingWindow(before=3) | ch.Lengths([4]))):
        assert bindings.one_pass(ch.weights(x, x, mask=mask).problem)
    per_head = ch.DenseMask(draw(4, 8, 200, 200) > 1)
    assert not bindings.one_pass(ch.weights(x, x, mask=per_head).problem)
    assert (
        ch.plan(x, x, x, mask=ch.MaskFunction(lambda b, h, q, k: (q // 48 + k // 64 + b * 0 + h * 0) % 2 == 0)).skipped
        > 0.4
    )


class Odd(ch.extend.Mask):
    def __init__(self, gaps, keys):
        self.gaps, self.keys = gaps, keys

    def lower(self, sizes):
        whole = torch.zeros(1, 1, 1, dtype=torch.int64)
        return ch.extend.Spans(whole, whole + self.keys, gaps=self.gaps)


@pytest.mark.parametrize("engine", ["native", "tiled", "sdpa"])
def test_gaps_of_ones_own(engine):
    """Empty ones, one that reaches past the hull, one outside of it."""
    x = draw(1, 1, 100, 8)
    lows, highs = (torch.tensor(v).view(1, 1, 1, -1) for v in ((5, 20, 20, 70), (9, 20, 33, 95)))
    keep = torch.ones(100, dtype=torch.bool)
    keep[5:9], keep[20:33], keep[70:] = False, False, False
    torch.testing.assert_close(ch.attention(x, x, x, mask=Odd((lows, highs), 80), engine=engine), truth(x, keep[None]))
    with pytest.raises(ch.ShapeError, match="sorted"):
        ch.attention(x, x, x, mask=Odd((lows.flip(-1), highs.flip(-1)), 80), engine=engine)
    for wrong in ((lows, highs[..., :2]), (lows[0], highs[0]), (lows.float(), highs.float()), (lows,), lows):
        with pytest.raises(ch.ShapeError, match="gaps"):
            ch.attention(x, x, x, mask=Odd(wrong, 80), engine=engine)


def test_the_kernels_see_no_map_where_each_query_sees_one_interval():
    x = draw(1, 1, 60, 8)
    for mask in (ch.Causal(), ch.Causal() | ch.SlidingWindow(before=3, after=3), ~ch.Causal(), ch.Lengths([7])):
        problem = ch.weights(x, x, mask=mask).problem
        assert blocks.blocks_of(problem, bindings.kernels()) is None
