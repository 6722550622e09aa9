"""What lies at the edges: numbers that are not finite or very large, widths of 0, subclasses, copies."""

import copy
import pickle

import pytest
import torch
from drawn import draw
from recomputed import check_script, run

import clearhead as ch

QUERY, KEY, VALUE = draw(3, 4), draw(5, 4, seed=1), draw(5, 2, seed=2)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("mask", [ch.Causal(), ch.Lengths(3), ch.Lengths(3) | ~ch.Causal()], ids=lambda m: m.title())
@pytest.mark.parametrize("sinks", [None, torch.zeros(1)], ids=["no sinks", "sinks"])
def test_the_script_gives_masked_pairs_no_weight_in_a_row_of_nan_either(which, mask, sinks):
    inputs = [QUERY.clone(), KEY.clone(), VALUE.clone()]
    inputs[which][1, 0] = float("nan")
    check_script(ch.explain(*inputs, mask=mask, align=0, sinks=sinks))


def test_the_sum_of_a_query_that_sees_nothing_has_no_term_of_the_sink():
    text = " ".join(str(ch.explain(QUERY, KEY, VALUE, mask=ch.Lengths(0), sinks=torch.tensor([5.0]))).split())
    assert "total[i] = Σ_j numerator[i, j] + exp(sink - maximum[i]), and 1 where blind[i]" in text
    assert "total[0] =" not in text  # no sum is written out: it is 1


@pytest.mark.parametrize("widths", [(0, 2), (4, 0), (0, 0)], ids=str)
def test_widths_of_0(widths):
    of_key, of_value = widths
    explanation = ch.explain(QUERY[:, :of_key], KEY[:, :of_key], VALUE[:, :of_value], bias=draw(3, 5))
    assert ("unbiased[0, 0] = " in str(explanation)) == (of_key > 0)  # an empty sum is 0, and is not written out
    assert explanation["output"].shape == (3, of_value)
    check_script(explanation)
    explanation.markdown(), explanation.to_dict()


def test_a_negative_bandwidth_is_squared_with_its_sign():
    score = ch.Gaussian(torch.nn.Parameter(torch.tensor(-0.7)))
    assert "/ (2·(-0.7000)²)" in str(ch.explain(QUERY, KEY, VALUE, score=score))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_the_length_of_a_very_large_or_small_vector(size):
    explanation = ch.explain(QUERY * size, KEY * size, VALUE, score=ch.Cosine())
    norms = (QUERY.double() * size).square().sum(-1, keepdim=True).sqrt()
    torch.testing.assert_close(explanation["query_norms"].double(), norms, rtol=1e-6, atol=0.0)
    space, _ = run(explanation)
    torch.testing.assert_close(space["unit_query"], explanation["unit_query"])


class Clipped(ch.Additive):
    def tile(self, query, key):
        return super().tile(query, key).clamp(-0.1, 0.1)

    def lower(self, query, key):
        return None


class Doubled(ch.Additive):
    def project(self, query, key):
        query, key = super().project(query, key)
        return 2 * query, key


class Squared(ch.Dot):
    def tile(self, query, key):
        return super().tile(query, key) ** 2

    def lower(self, query, key):
        return None


@pytest.mark.parametrize("kind", [Clipped, Doubled, Squared])
def test_a_score_that_changes_another_one_is_not_shown_by_that_one_s_steps(kind):
    score = kind() if kind is Squared else kind(4, 4, 3)
    explanation = ch.explain(QUERY, KEY, VALUE, score=score)
    with torch.no_grad():
        torch.testing.assert_close(explanation["output"], ch.attention(QUERY, KEY, VALUE, score=score))
    assert f"{kind.__name__}(query, key)" in str(explanation)
    check_script(explanation)


class Before(ch.Causal):
    def lower(self, sizes):
        spans = super().lower(sizes)
        return spans._replace(stop=(spans.stop - 1).clamp(0))


@pytest.mark.parametrize("change", [lambda m: m, lambda m: ~m, lambda m: m & ch.Lengths(4)], ids=["itself", "~", "&"])
def test_a_mask_that_changes_another_one_is_not_shown_by_that_one_s_steps(change):
    given = {"mask": change(Before()), "align": 1}
    explanation = ch.explain(QUERY, KEY, VALUE, **given)
    torch.testing.assert_close(explanation["output"], ch.attention(QUERY, KEY, VALUE, **given))
    check_script(explanation)


COPIES = {"pickle": lambda e: pickle.loads(pickle.dumps(e)), "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("gradients", [False, True])
def test_an_explanation_is_copied_and_pickled(how, gradients):
    given = {"score": ch.Additive(4, 4, 3), "mask": ch.Causal(), "align": 0, "gradients": gradients}
    explanation = ch.explain(QUERY, KEY, VALUE, **given)
    again = COPIES[how](explanation)
    assert str(again) == str(explanation)
    assert again.script() == explanation.script()


@pytest.mark.parametrize("gradients", [False, True])
def test_an_explanation_holds_no_graph_and_reads_the_same_under_autocast(gradients):
    explanation = ch.explain(QUERY, KEY, VALUE, score=ch.Cosine(), mask=ch.Causal(), align=0, gradients=gradients)
    said = str(explanation)
    with torch.autocast("cpu"):
        assert str(explanation) == said
    assert not [step for step in explanation.steps if step.made or step.by or step.value.requires_grad]


@pytest.mark.parametrize("gradients", [False, True])
def test_an_explanation_keeps_its_numbers_when_the_inputs_change(gradients):
    inputs, score = [QUERY.clone(), KEY.clone(), VALUE.clone()], ch.Bilinear(4, 4)
    keep, added, sinks = draw(3, 5) > -1, draw(3, 5), draw(1)
    given = {"score": score, "mask": keep, "bias": added, "sinks": sinks, "gradients": gradients}
    explanation = ch.explain(*inputs, **given)
    said, script = str(explanation), explanation.script()
    with torch.no_grad():
        for tensor in (*inputs, added, sinks, score.W):
            tensor.add_(1)
        keep.logical_not_()
    assert str(explanation) == said
    assert explanation.script() == script
    explanation["W"].zero_()
    assert score.W.any()


@pytest.mark.parametrize("at", [[0, 1], (0, 1), "a", 1.5, 3, -4, slice(2, 2), slice("a"), {}], ids=str)
def test_an_index_that_names_no_position_is_an_error(at):
    with pytest.raises(ch.ClearheadError, match="x has 3 positions"):
        ch.explain(ch.nn.SinusoidalPositionalEncoding(4), QUERY, at=at)


@pytest.mark.parametrize("at", [-1, slice(1, None), slice(None, None, -1)], ids=str)
def test_positions_from_the_end(at):
    module = ch.nn.SinusoidalPositionalEncoding(4)
    places = list(range(3)[at]) if isinstance(at, slice) else [range(3)[at]]
    torch.testing.assert_close(ch.explain(module, QUERY, at=at)["result"], module(QUERY)[places])


@pytest.mark.parametrize("shape", [(0, 4), (0, 3, 4)], ids=str)
def test_no_position_is_an_error(shape):
    with pytest.raises(ch.ClearheadError, match="nothing to explain"):
        ch.explain(ch.nn.SinusoidalPositionalEncoding(4), draw(*shape))


@pytest.mark.parametrize(
    ("dtype", "gradients", "words"),
    [("longdouble", True, "float128|longdouble"), ("int64", True, "no input has one")],
)
def test_gradients_that_there_are_not(dtype, gradients, words):
    arrays = [tensor.numpy().astype(dtype) for tensor in (QUERY, KEY, VALUE)]
    with pytest.raises(ch.ClearheadError, match=words):
        ch.explain(*arrays, gradients=gradients)


def test_a_late_mask_leaves_the_softmax_of_all_scores():
    causal = ch.explain(*(draw(4, 4, seed=seed) for seed in range(3)), mask=ch.Causal())
    hidden = ~torch.ones(4, 4, dtype=torch.bool).tril()
    late = causal["scores"].softmax(-1).masked_fill(hidden, 0.0)
    torch.testing.assert_close(causal["masked_after"], late, rtol=1e-6, atol=1e-6)


def test_what_a_late_mask_would_give_is_said_where_something_is_masked():
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    for at, there in (((1, 1), True), ((3, 1), False)):
        names = [step.name for step in ch.explain(x, x, x, mask=ch.Causal(), at=at).steps]
        assert ("masked_after" in names) is there
    assert "masked_after" not in [step.name for step in ch.explain(x, x, x, mask=ch.Lengths([4])).steps]


@pytest.mark.parametrize("before", [(), (ch.masked_softmax,)])
@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ([[1.0, 2.0], [3.0]], "Pad its rows"),
        ([torch.zeros(2, device="meta")] * 2, "torch.stack"),
        ([torch.zeros(2, requires_grad=True)] * 2, "torch.stack"),
    ],
)
def test_lists_that_are_no_array_are_told(before, scores, words):
    with pytest.raises(ch.ClearheadError, match=words):
        ch.explain(*before, scores, gradients=True)
    with pytest.raises(ch.ClearheadError, match=words):
        ch.masked_softmax(scores)
