"""Cases that random problems meet by chance, each by hand: faults planted in the sources passed without them."""

import copy

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead._engine_comparison import compare, draw
from clearhead.base.shapes import Sizes
from clearhead.engines.tiled.look import PEAK
from clearhead.masks import Intervals
from clearhead.masks.base import dense
from clearhead.models.edits.spot import Spot
from clearhead.models.interception.padding import Told, of_call
from clearhead.nn import KeyValueCache
from clearhead.problem import regions
from clearhead.problem.problem import make_problem
from clearhead.testing import engines


def drawn(*shape, seed=0, dtype=torch.float64):
    return draw(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(queries, keys, dtype=torch.float64):
    return (drawn(1, 2, n, 4, seed=seed, dtype=dtype) for seed, n in enumerate((queries, keys, keys)))


def test_cosines_of_vectors_whose_squares_overflow():
    query, key = drawn(1, 2, 3, 4, dtype=torch.float32), drawn(1, 2, 5, 4, seed=1, dtype=torch.float32)
    torch.testing.assert_close(ch.Cosine()(query * 1e30, key * 1e-30), ch.Cosine()(query, key))


@pytest.mark.parametrize("engine", [*engines(), "reference"])
def test_a_softcap_is_that_of_the_formula(engine):
    query, key, value = inputs(3, 5, torch.float32)
    if engine == "sdpa":
        with pytest.raises(ch.UnsupportedError):
            ch.attention(query, key, value, score=ch.Dot(softcap=3.0), engine=engine)
        return
    want = (3 * torch.tanh(query @ key.mT / 2 / 3)).softmax(-1) @ value
    torch.testing.assert_close(ch.attention(query, key, value, score=ch.Dot(softcap=3.0), engine=engine), want)


@pytest.mark.parametrize("score", [ch.Dot(), lambda query, key: query @ key.mT], ids=["dot", "tile"])
@pytest.mark.parametrize("engine", ["tiled", "reference"])
@pytest.mark.parametrize("added", [False, True])
def test_a_query_that_sees_nothing_has_no_gradient(engine, score, added):
    """By a mask, or by −∞ that is added to its scores."""
    given = [x.requires_grad_() for x in inputs(3, 5)]
    keep = torch.ones(3, 5, dtype=torch.bool)
    keep[1] = False
    mask = torch.zeros(3, 5, dtype=torch.float64).masked_fill(~keep, -torch.inf) if added else keep
    output = ch.attention(*given, score=score, mask=mask, engine=engine)
    gradients = torch.autograd.grad(output.sum(), given)
    assert not output[:, :, 1].any() and not gradients[0][:, :, 1].any()
    assert all(bool(g.isfinite().all()) and bool(g.any()) for g in gradients[1:])


@pytest.mark.parametrize("engine", ["tiled", "reference", "native"])
def test_rows_with_sinks_do_not_sum_to_1(engine):
    query, key, _ = inputs(3, 5, torch.float32)
    sinks = torch.tensor([0.3, -1.0])
    lazy = ch.weights(query, key, sinks=sinks, engine=engine)
    scores = torch.cat([query @ key.mT / 2, sinks.view(1, 2, 1, 1).expand(1, 2, 3, 1)], -1)
    want = scores.softmax(-1)[..., :-1]
    torch.testing.assert_close(lazy.dense(), want)
    torch.testing.assert_close(lazy[0, 1, 2], want[0, 1, 2])
    query.requires_grad_()
    torch.testing.assert_close(ch.weights(query, key, sinks=sinks, engine=engine)[:, :, 1:].detach(), want[:, :, 1:])


@pytest.mark.parametrize("bias", [ch.RelativeBias, ch.DenseBias], ids=lambda one: one.__name__)
def test_biases_of_keys_that_begin_later(bias, monkeypatch):
    monkeypatch.setattr(regions, "BUDGET", 2000)
    sizes = Sizes(3, 2, 3 * regions.ROWS, 3 * regions.ROWS, torch.device("cpu"), align="lower_right")
    compare("tiled", ch.Dot.example(), ch.SlidingWindow(before=2), sizes.shape[2:], bias.example(sizes))


@pytest.mark.parametrize("engine", ["tiled", "native"])
def test_a_hidden_value_near_the_largest_number_gives_no_gradient(engine):
    """0 · ∞: the gradient of a weight that is 0 may be infinite."""
    query, key, value = inputs(3, 5, torch.float32)
    value[:, :, 1] = 3e38
    keep = torch.ones(3, 5, dtype=torch.bool)
    keep[0, 1] = False
    given = [x.requires_grad_() for x in (query, key, value)]
    output = ch.attention(*given, mask=ch.DenseMask(keep), engine=engine)
    loss = torch.zeros_like(output)
    loss[:, :, 0] = 100.0
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(output, given, loss))


@pytest.mark.parametrize("engine", ["tiled", "reference", "native"])
def test_maps_whose_cells_lie_in_several_blocks(engine, monkeypatch):
    monkeypatch.setattr(regions, "LOOK", 60)
    monkeypatch.setattr(regions, "BUDGET", 60)
    query, key, _ = inputs(24, 30, torch.float32)
    lazy = ch.weights(query, key, engine=engine)
    dense = (query @ key.mT / 2).softmax(-1)
    cells = dense.view(1, 2, 3, 8, 2, 15)
    peak, mean = lazy.reduce(ch.reductions.Pool((3, 2))), lazy.reduce(ch.reductions.Pool((3, 2), "mean"))
    torch.testing.assert_close(peak, cells.amax((3, 5)))
    torch.testing.assert_close(mean, cells.mean((3, 5)))
    torch.testing.assert_close(lazy.received(), dense.sum(-2))


@pytest.mark.parametrize("engine", ["tiled", "reference", "native"])
def test_the_largest_score_of_keys_that_begin_later(engine):
    query, key, _ = inputs(9, 9, torch.float32)
    query.requires_grad_(), key.requires_grad_()
    later = ch.weights(query, key, mask=ch.Padding(torch.arange(9)[None] >= 4), engine=engine).reduce(
        ch.reductions.MaxScore()
    )
    spans = ch.weights(query, key[:, :, 4:], engine="reference").reduce(ch.reductions.MaxScore())
    torch.testing.assert_close(later, spans)
    window = ch.weights(query, key, mask=ch.SlidingWindow(before=1), engine=engine).reduce(ch.reductions.MaxScore())
    keep = ch.SlidingWindow(before=1).dense(9, 9)
    want = (query @ key.mT / 2).masked_fill(~keep, -torch.inf).amax(-1)
    for found, expected in ((window, want), (later, (query @ key[:, :, 4:].mT / 2).amax(-1))):
        torch.testing.assert_close(found, expected)
        both = [torch.autograd.grad(one.sum(), (query, key), retain_graph=True) for one in (found, expected)]
        torch.testing.assert_close(*both)


@pytest.mark.parametrize("engine", ["tiled", "reference"])
def test_more_of_the_largest_than_a_chunk_of_the_tournament_has(engine):
    """Chunks between the first and the last key are masked: each key is taken once all the same."""
    keys = 3 * PEAK
    keep = torch.zeros(2, keys, dtype=torch.bool)
    keep[:, :PEAK] = keep[:, -1] = True
    query, key, _ = inputs(2, keys)
    values, indices = ch.weights(query, key, mask=ch.DenseMask(keep), engine=engine).topk(2 * PEAK + 9)
    assert all(len(set(row.tolist())) == 2 * PEAK + 9 for row in indices.flatten(0, 2))
    want = (query @ key.mT / 2).masked_fill(~keep, -torch.inf).softmax(-1)
    torch.testing.assert_close(values, want.topk(2 * PEAK + 9).values)
    torch.testing.assert_close(values, want.gather(-1, indices))


@pytest.mark.parametrize("engine", [*engines(), "reference"])
def test_a_hidden_key_that_is_no_number(engine):
    """Between two that are seen, and for some queries alone."""
    query, key, value = inputs(3, 5, torch.float32)
    keep = torch.ones(3, 5, dtype=torch.bool)
    keep[:, 2] = False
    want = ch.attention(query, key, value, mask=ch.DenseMask(keep), engine="reference")
    dirty_key, dirty_value = key.clone(), value.clone()
    dirty_key[:, :, 2] = dirty_value[:, :, 2] = torch.nan
    found = ch.attention(query, dirty_key, dirty_value, mask=ch.DenseMask(keep), engine=engine)
    torch.testing.assert_close(found, want)
    keep[0, 2] = True
    if engine != "sdpa":  # as its notes say
        found = ch.attention(query, dirty_key, dirty_value, mask=ch.DenseMask(keep), engine=engine)
        assert bool(found[:, :, 0].isnan().all())
        torch.testing.assert_close(found[:, :, 1:], want[:, :, 1:])


@pytest.mark.parametrize("engine", ["tiled", "native"])
def test_intervals_of_one_query_inside_that_of_another(engine):
    query, key, value = inputs(2, 30, torch.float32)
    mask = Intervals(torch.tensor([0, 0]), torch.tensor([30, 2])) | Intervals(
        torch.tensor([0, 4]), torch.tensor([0, 6])
    )
    given = {"mask": mask, "align": "lower_right"}
    want = ch.attention(query, key, value, **given, engine="reference")
    torch.testing.assert_close(ch.attention(query, key, value, **given, engine=engine), want)


class Weighted(ch.extend.Score):
    """A product with a weight for each dimension."""

    def __init__(self, width=4):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1.0, 2.0, width))

    @classmethod
    def example(cls):
        return cls(), 4, 4

    def tile(self, query, key):
        return (query * self.weight) @ key.transpose(-1, -2)

    def lower(self, query, key):
        return ch.extend.Pairwise("mul", query, key, weight=self.weight)


@pytest.mark.parametrize("engine", engines())
def test_a_product_with_a_weight_for_each_dimension(engine):
    compare(engine, Weighted.example(), ch.Causal(), (7, 9))


@pytest.mark.parametrize("engine", [*engines(), "reference"])
def test_tensors_that_are_negated_where_they_are_read(engine):
    query, key, value = inputs(3, 5, torch.float32)
    want = ch.attention(-query, -key, -value, mask=ch.Causal(), align="lower_right", engine="reference")
    lazily = (torch._neg_view(x) for x in (query, key, value))
    found = ch.attention(*lazily, mask=ch.Causal(), align="lower_right", engine=engine)
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("engine", [*(name for name in engines() if name != "sdpa"), "reference"])
def test_sinks_that_are_negated_where_they_are_read(engine):
    query, key, value = inputs(3, 5, torch.float32)
    sinks = torch.tensor([1.0, 3.0], dtype=torch.float32)
    want = ch.attention(query, key, value, sinks=-sinks, engine="reference")
    torch.testing.assert_close(ch.attention(query, key, value, sinks=torch._neg_view(sinks), engine=engine), want)


def test_two_branches_of_a_cache_hold_their_own():
    key, first, second = drawn(1, 2, 3, 4), drawn(1, 2, 1, 4, seed=1), drawn(1, 2, 1, 4, seed=2)
    with torch.no_grad():
        cache = KeyValueCache()
        cache.append(key, key)
        branch = copy.copy(cache)
        mine, _ = cache.append(first, first)
        theirs, _ = branch.append(second, second)
    assert torch.equal(mine, torch.cat([key, first], 2)) and torch.equal(theirs, torch.cat([key, second], 2))


class Biased(torch.nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.bias = bias

    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.bias)


def test_a_bias_below_0_is_no_mask():
    query, key, value = inputs(3, 5, torch.float32)
    model = Biased(drawn(3, 5, seed=7, dtype=torch.float32) - 2)
    with ch.watch(model) as seen:
        output = model(query, key, value)
    assert bool((model.bias < 0).any())
    torch.testing.assert_close(seen.calls[0].weights @ value, output)


class WritesItsMask(torch.nn.Module):
    def forward(self, query, key, value):
        mask = torch.zeros(3, 5)
        first = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        mask[:, 0] = -torch.inf
        return first + F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def test_a_mask_that_is_written_to_between_two_calls():
    query, key, value = inputs(3, 5, torch.float32)
    with ch.watch(model := WritesItsMask()) as seen:
        output = model(query, key, value)
    first, second = (call.weights for call in seen.calls)
    assert bool((first[..., 0] > 0).all()) and not second[..., 0].any()
    torch.testing.assert_close(first @ value + second @ value, output)


def test_the_padding_behind_a_cache_of_the_last_words():
    words = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1], [1] * 8]).bool()
    query, key = torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 5, 4)
    problem = make_problem(query, key, score=ch.Dot(), mask=ch.Padding(words[:, 3:]), align="lower_right")
    real = of_call(Told(words), "self", problem, None, 5)
    assert real is not None and real.queries is None and torch.equal(real.keys, words[:, 3:])


def test_a_forced_mask_sees_no_slot_that_is_not_filled():
    query, key = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 6, 4)
    problem = make_problem(query, key, score=ch.Dot(), align="lower_right")
    spot = Spot(range(3, 4), range(6), 4, range(2), 2)
    forced = ch.edits.ForceMask(ch.SlidingWindow(before=9, after=9)).before(problem, spot)
    assert dense(forced.spans, forced.sizes)[0, 0, 0].tolist() == [True] * 4 + [False] * 2


def test_an_output_is_told_to_be_made_of_all_that_weighs_something():
    explanation = ch.explain(torch.zeros(1, 4), torch.zeros(3, 4), torch.ones(3, 2))
    assert "33% of the value of" in next(step.why for step in explanation.steps if step.name == "output")


def test_how_sure_it_is_that_a_mask_is_upside_down():
    """Later keys alone are never meant; a query's own and later ones may be."""
    query, key, value = inputs(8, 8, torch.float32)
    own = torch.ones(8, 8, dtype=torch.bool).triu()
    found = [ch.diagnose(query, key, value, mask=ch.DenseMask(keep)) for keep in (own, own.triu(1))]
    severities = [[one.severity for one in each if "upside down" in one.evidence] for each in found]
    assert severities == [["warning"], ["error"]]
