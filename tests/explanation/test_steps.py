"""Every step of every score × mask, against attention's own numbers, and against a program in plain PyTorch."""

import contextlib
import html
import itertools
import json
import re

import numpy as np
import pytest
import torch
from drawn import draw
from recomputed import check_script, run

import clearhead as ch
from clearhead.base.shapes import Sizes
from clearhead.base.symbolic.steps import Step, made, number
from clearhead.testing import masks, scores

ENGINES = ("reference", "tiled", "native")


def check(explanation, query, key, value, **given):
    """The explanation of a call, by all that clearhead knows of it from elsewhere."""
    with torch.no_grad():
        for engine in ENGINES:
            with contextlib.suppress(ch.UnsupportedError):
                output = ch.attention(query, key, value, **given, engine=engine)
                torch.testing.assert_close(explanation["output"], output, rtol=1e-5, atol=1e-5)
        weights = ch.weights(query, key, **given)
        torch.testing.assert_close(explanation["weights"], weights.dense(), rtol=1e-5, atol=1e-6)
        names = [step.name for step in explanation.steps]
        if not {"bias", "not_finite"} & set(names):
            raw = "scores" if "products" not in names else "products"
            scale = 1.0 if raw == "scores" else query.shape[-1] ** -0.5
            torch.testing.assert_close(explanation[raw] * scale, weights.scores(), rtol=1e-5, atol=1e-5)
    for text in (check_script(explanation), explanation.markdown()):
        words = " ".join(html.unescape(text).replace("\\", "").split())
        assert [step.name for step in explanation.steps if step.why not in words] == []
    json.dumps(explanation.to_dict(), allow_nan=False)


MORE = itertools.cycle(["plain", "bias", "sinks"])  # each with every score and with every mask


@pytest.mark.parametrize(
    ("score", "mask", "more"), [(*pair, next(MORE)) for pair in itertools.product(scores(), [None, *masks()])]
)
def test_every_step_is_what_attention_computes(score, mask, more):
    score, query_dim, key_dim = score.example()
    query, key, value = draw(2, 2, 4, query_dim), draw(2, 2, 5, key_dim, seed=1), draw(2, 2, 5, 3, seed=2)
    sizes = Sizes(2, 2, 4, 5, align="lower_right")
    given = {"score": score, "mask": None if mask is None else mask.example(sizes), "align": "lower_right"}
    if more == "bias":
        edges = None if mask is None else given["mask"]._document_edges
        given["bias"] = draw(2, *(sizes if edges is None else edges.pad_sizes(sizes))[2:4], seed=3)[None]
    if more == "sinks":
        given["sinks"] = draw(2, seed=4)
    check(ch.explain(query, key, value, **given), query, key, value, **given)


@pytest.mark.parametrize("shape", [(), (2,), (2, 2), (2, 1, 2)], ids=str)
def test_leading_dimensions_stay_those_of_the_inputs(shape):
    query, key, value = draw(*shape, 3, 4), draw(*shape, 5, 4, seed=1), draw(*shape, 5, 2, seed=2)
    explanation = ch.explain(query, key, value)
    if len(shape) < 3:
        check(explanation, query, key, value)
    else:  # the outer ones are one axis of sequences
        output = ch.attention(query, key, value).flatten(0, 1)
        torch.testing.assert_close(explanation["output"], output, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("score", scores(), ids=lambda s: s.__name__)
def test_a_score_s_steps_end_in_its_tile(score):
    score, query_dim, key_dim = score.example()
    query, key = draw(2, 3, 4, query_dim), draw(2, 3, 5, key_dim, seed=1)
    sides = Step("query", "", query, ("B", "H", "Lq", "E")), Step("key", "", key, ("B", "H", "Lk", "E"))
    last = score.steps(*sides)[-1]
    assert last.name == "scores"
    assert torch.equal(last.value, score.tile(query, key))


@pytest.mark.parametrize("mask", masks(), ids=lambda m: m.__name__)
def test_a_mask_s_steps_end_in_the_mask(mask):
    sizes = Sizes(2, 2, 4, 5, align="lower_right")
    mask = mask.example(sizes)
    sides = (slice(1, 2), slice(0, 2), slice(1, 4, 2), slice(0, 5))
    last = mask.steps(sizes, sides, "seen")[-1]
    assert last.name == "seen"
    whole = mask._compute_matrix(sizes).expand(sizes.shape)
    assert torch.equal(last.value.expand(1, 2, 2, 5), whole[sides])


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        (ch.Causal(), ["seen_queries", "seen_keys"]),
        (ch.SlidingWindow(before=1, after=2), ["seen_queries", "seen_keys"]),
        (ch.SlidingWindow(before=1, after=2**60), ["seen_queries", "seen_keys"]),
        (ch.FirstKeys(2), ["seen_count", "seen_positions"]),
        (ch.FirstKeys(2**60), ["seen_count", "seen_positions"]),
        (ch.PrefixLM([0, 3]), ["seen_queries", "seen_keys", "seen_lengths"]),
        (ch.Documents([0, 0, 1, 1, 0]), ["seen_query_ids", "seen_key_ids"]),
        (ch.Documents([[0, 0, 1, 1, 0], [-1, 2, 2, 2, -1]]), ["seen_query_ids", "seen_key_ids"]),
        (ch.Documents.from_cu_seqlens([0, 1, 4], [0, 3, 5]), ["seen_query_ids", "seen_key_ids"]),
        (ch.Padding(torch.tensor([[1, 1, 0, 1, 0], [0, 0, 1, 1, 1]])), []),
        (ch.Lengths([[1, 2, 3, 4], [5, 4, 3, 2]]), ["seen_lengths", "seen_positions"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("align", [0, "lower_right", -2, torch.tensor([1, 3])], ids=str)
def test_a_mask_s_code_gives_the_mask(mask, names, align):
    sizes = Sizes(2, 2, 4, 5, align=align)
    sides = (slice(0, 2), slice(1, 2), slice(1, 4, 2), slice(0, 5))
    *before, last = mask.steps(sizes, sides, "seen")
    whole = mask._compute_matrix(sizes).expand(sizes.shape)[sides]
    assert torch.equal(last.value.expand(whole.shape), whole)
    if type(mask) is ch.Documents and (isinstance(align, torch.Tensor) or align == -2):
        names = []  # some queries stand at no key, and have no document
    assert [step.name for step in before] == names
    space = {step.name: step.value for step in before}
    if last.code:
        exec(last.code, space)
        assert torch.equal(space["seen"].expand(whole.shape), whole)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_scale_and_softcap_are_steps(cap):
    query = draw(3, 4)
    given = {"score": ch.Dot(softcap=cap), "scale": 0.3}
    explanation = ch.explain(query, query, query, **given)
    names = [step.name for step in explanation.steps]
    assert ("uncapped" in names) == (cap is not None)
    torch.testing.assert_close(explanation["output"], ch.attention(query, query, query, **given))
    assert "products[i, j] · 0.3000" in str(explanation)


def test_grouped_heads_repeat_their_key_heads():
    query, key = draw(1, 4, 3, 4), draw(1, 2, 5, 4, seed=1)
    explanation = ch.explain(query, key, key)
    check(explanation, query, key, key)
    assert "head h uses key head h // 2" in " ".join(str(explanation).split())
    one = ch.explain(query, key, key, at=(0, 3))
    assert torch.equal(one["key"], key[:, 1:])


def test_a_part_has_the_weights_of_the_whole():
    query, key, value = draw(2, 3, 40, 8), draw(2, 3, 50, 8, seed=1), draw(2, 3, 50, 4, seed=2)
    given = {"mask": ch.Causal() & ch.Lengths([30, 50]), "align": "lower_right"}
    whole = ch.weights(query, key, **given)
    for at in ((1, 2, 17), (1, 2, 17, 3), (0, slice(0, 2), slice(3, 5)), (1,), (..., 7, slice(2, 9))):
        explanation = ch.explain(query, key, value, **given, at=at)
        shown = explanation.shown
        part = whole.dense()[list(shown.batches)][:, list(shown.heads)][:, :, list(shown.queries)]
        torch.testing.assert_close(explanation["weights"], part, rtol=1e-5, atol=1e-6)
    assert ch.explain(query, key, value, **given, at=(1, 2, 17, 3)).shown.pair == (0, 0, 0, 3)
    assert "scores[1, 2, 17, 3] = " in str(ch.explain(query, key, value, **given, at=(1, 2, 17, 3)))


def test_what_is_left_out_is_said():
    query = draw(3, 4, 40, 8)
    text = " ".join(str(ch.explain(query, query, query)).split())
    assert "Of 3 sequences: the first is shown." in text
    assert "Of 40 queries: the first 8 are shown." in text
    assert "Of 40 keys 5 are shown: the key of the written-out lines, and the keys with the largest weights." in text
    assert "Shown: sequence 0." in text
    assert "Of 9 heads: the first is shown." in " ".join(str(ch.explain(*[draw(1, 9, 2, 4)] * 3)).split())


def test_the_heads_that_are_asked_for_are_shown():
    query, many = draw(2, 12, 3, 8), draw(1, 70, 2, 4)
    for at, heads in (
        ((1, slice(None)), range(12)),
        ((slice(None), slice(2, 11)), range(2, 11)),
        ((0, slice(0, 12, 3), 1), range(0, 12, 3)),
        (0, [0]),
        (None, [0]),
        ((..., 1), [0]),
    ):
        explanation = ch.explain(query, query, query, at=at)
        assert explanation.shown.heads == tuple(heads)
        shown, dense = explanation.shown, ch.weights(query, query)[:]
        part = dense[list(shown.batches)][:, list(heads)][:, :, list(shown.queries)]
        torch.testing.assert_close(explanation["weights"], part)
    assert len(ch.explain(query[:, :8], query[:, :8], query[:, :8]).shown.heads) == 8
    found = ch.explain(many, many, many, at=(0, slice(None)))
    assert found.shown.heads == tuple(range(64))
    assert "Of 70 heads: the first 64 are shown." in " ".join(str(found).split())


SOFTMAXES = {
    "alone": {},
    "lengths": {"valid_lens": [2, 5]},
    "a length for each query": {"valid_lens": torch.tensor([[1, 2, 3], [0, 5, 4]])},
    "causal": {"mask": ch.Causal(), "align": "lower_right"},
    "a matrix": {"mask": torch.rand(3, 5, generator=torch.Generator().manual_seed(3)) < 0.6},
    "both": {"mask": ch.Causal(), "align": "lower_right", "valid_lens": [3, 4]},
}


def softmax_by_hand(scores, mask=None, align=None, valid_lens=None):
    """The softmax over the keys that a mask, a bool matrix and lengths allow, in plain PyTorch."""
    keep = torch.ones_like(scores, dtype=torch.bool)
    if align is not None:
        keep &= torch.ones(3, 5).tril(2).bool()
    elif mask is not None:
        keep &= mask
    if valid_lens is not None:
        lengths = torch.as_tensor(valid_lens)
        keep &= torch.arange(5) < (lengths[:, None, None] if lengths.ndim == 1 else lengths[..., None])
    return scores.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num(0.0)


@pytest.mark.parametrize("name", SOFTMAXES)
def test_scores_of_ones_own(name):
    scores, given = draw(2, 3, 5), SOFTMAXES[name]
    expected = softmax_by_hand(scores, **given)
    explanation = ch.explain(scores, **given)
    torch.testing.assert_close(explanation["weights"], expected)
    assert torch.equal(explanation["scores"], scores) and "query" not in [step.name for step in explanation.steps]
    torch.testing.assert_close(ch.explain(scores, **given, at=(1, 2))["weights"], expected[1:, 2:])
    check_script(explanation)
    if len(given) < 3:
        one = given.get("valid_lens", given.get("mask"))
        called = ch.explain(ch.masked_softmax, scores, one, align=given.get("align"))
        assert torch.equal(called["weights"], explanation["weights"])


def test_scores_of_other_kinds():
    scores = draw(2, 3, 5)
    assert isinstance(ch.explain(scores.numpy(), valid_lens=[2, 5])["weights"], np.ndarray)
    assert isinstance(ch.explain(ch.masked_softmax, scores.tolist(), [2, 5])["weights"], np.ndarray)
    assert isinstance(ch.explain(ch.masked_softmax, scores, np.array([2, 5]))["weights"], torch.Tensor)
    torch.testing.assert_close(ch.explain(scores[0, 0])["weights"][0], scores[0, 0].softmax(-1))
    four = draw(2, 12, 3, 5)
    explanation = ch.explain(four, at=(1, slice(4, 12)))
    torch.testing.assert_close(explanation["weights"], four[1:, 4:].softmax(-1))
    gradient = ch.explain(scores, valid_lens=[2, 5], gradients=torch.ones(2, 3, 5).cumsum(-1))["d_scores"]
    leaf = scores.clone().requires_grad_()
    (softmax_by_hand(leaf, valid_lens=[2, 5]) * torch.ones(2, 3, 5).cumsum(-1)).sum().backward()
    torch.testing.assert_close(gradient, leaf.grad)


def test_lengths_as_a_module_takes_them():
    query, key = draw(2, 3, 4), draw(2, 5, 4, seed=1)
    explanation = ch.explain(query, key, key, valid_lens=[2, 5])
    check(explanation, query, key, key, mask=ch.Lengths([2, 5]))


def test_arrays_give_arrays():
    query, key = draw(2, 3, 4), draw(2, 5, 4, seed=1)
    for gradients in (False, True):
        explanation = ch.explain(query.numpy(), key.numpy(), key.numpy(), gradients=gradients)
        assert all(isinstance(explanation[step.name], np.ndarray) for step in explanation.steps)
        tensors = ch.explain(query, key, key, gradients=gradients)
        for step in tensors.steps:
            assert np.array_equal(explanation[step.name], tensors[step.name].numpy(), equal_nan=True)
    module, lengths = ch.nn.DotProductAttention(), np.array([2, 5])
    found = ch.explain(module, query.numpy(), key.numpy(), key.numpy(), lengths)["output"]
    np.testing.assert_allclose(found, module(query, key, key, lengths).numpy(), rtol=1e-5, atol=1e-6)
    assert isinstance(ch.explain(module, query, key, key, lengths)["output"], torch.Tensor)


def test_the_keys_that_are_shown_have_the_largest_weights_and_are_those_that_lines_name():
    query, key = draw(10, 8), draw(10, 8, seed=1)
    for seed in range(5):
        key = draw(10, 8, seed=seed)
        for given in ({}, {"mask": ch.Causal()}):
            explanation = ch.explain(query, key, key, **given)
            weights = explanation["weights"]
            shown = explanation.shown.strongest[:5]
            text = " ".join(str(explanation).split())
            said = re.search("each times its weight: (.*?); …", text)[1]
            named = {int(n) for n in re.findall(r"the value of key (\d+)", said)}
            assert named <= set(shown) and set(weights[:3].argmax(-1).tolist()) <= named
    first = ch.explain(query, key, key, mask=ch.Causal(), at=(slice(0, 3),))
    assert first.shown.strongest[:5][-2:] == (3, 4)  # of keys that no row sees the first ones, and not any


def test_the_terms_of_a_long_sum_stand_in_the_table():
    """Of a row of many keys the terms that are written out are those whose keys are shown."""
    query, key = draw(1, 8), draw(40, 8, seed=1)
    explanation = ch.explain(query, key, key, at=(0, 30))
    steps = {step["name"]: step for part in explanation.to_dict()["parts"] for step in part["steps"]}
    few = {number(explanation["numerator"][0, j]) for j in explanation.shown.strongest[:5]}
    terms = steps["total"]["written_out"].partition(" = ")[2].partition(" + …")[0].split(" + ")
    assert len(terms) == 4 and {*terms} <= few


def test_a_key_that_nobody_sees_is_shown_as_it_was_given():
    key = draw(4, 2)
    assert torch.equal(ch.explain(key, key, key, mask=ch.Lengths(2))["key"], key)


def test_what_is_not_finite_is_said_and_reaches_those_who_see_it():
    key = draw(4, 2)
    key[3] = float("nan")
    explanation = ch.explain(draw(4, 2, seed=1), key, key, mask=ch.Causal())
    assert explanation["output"][3].isnan().all()
    assert explanation["output"][:3].isfinite().all()
    assert "NaN is put here" in " ".join(str(explanation).split())


def test_a_query_that_sees_nothing_gives_0():
    query = draw(2, 3, 4)
    explanation = ch.explain(query, query, query, mask=ch.Lengths([0, 2]))
    assert explanation["blind"][0].all()
    assert not explanation["output"][0].any()
    check(explanation, query, query, query, mask=ch.Lengths([0, 2]))


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_dtype_changes_nothing(default):
    query, mask = draw(3, 4), ch.Causal()
    expected = str(ch.explain(query, query, query, score=ch.Gaussian(0.5), mask=mask))
    torch.set_default_dtype(default)
    try:
        assert str(ch.explain(query, query, query, score=ch.Gaussian(0.5), mask=mask)) == expected
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("score", scores(), ids=lambda s: s.__name__)
def test_other_precisions(score, dtype):
    score, query_dim, key_dim = score.example()
    query, key, value = (draw(3, n, seed=n).to(dtype) for n in (query_dim, key_dim, 2))
    explanation = ch.explain(query, key, value, score=score.to(dtype))
    assert explanation["scores"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    output = ch.attention(query, key, value, score=score, engine="reference")
    tolerance = 1e-9 if dtype == torch.float64 else 1e-2
    torch.testing.assert_close(explanation["output"].to(dtype), output, rtol=tolerance, atol=tolerance)
    run(explanation)


def test_numpy_and_inference_mode():
    query = draw(3, 4)
    expected = ch.explain(query, query, query)["output"]
    assert np.array_equal(ch.explain(*[query.numpy()] * 3)["output"], expected.numpy())
    with torch.inference_mode():
        assert torch.equal(ch.explain(query, query, query)["output"], expected)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"at": (0, 0, 0, 0, 0)}, "too many parts"),
        ({"at": (0, 99)}, "out of range"),
        ({"at": (slice(3, 3),)}, "names no"),
        ({"at": "word"}, "not basic"),
    ],
)
def test_an_index_that_names_no_pair_is_an_error(given, words):
    query = draw(2, 3, 4)
    with pytest.raises(ch.ClearheadError, match=words):
        ch.explain(query, query, query, **given)


def test_no_pairs_is_an_error():
    with pytest.raises(ch.ClearheadError, match="without a pair"):
        ch.explain(draw(0, 4), draw(0, 4), draw(0, 4))


def test_a_script_of_many_numbers_is_refused():
    query = draw(300, 64)
    with pytest.raises(ch.ClearheadError, match="38,912 numbers"):
        ch.explain(query, query, query).script()


def test_a_name_that_no_step_has_is_an_error_that_lists_them():
    query = draw(2, 4)
    with pytest.raises(ch.ClearheadError, match=r"'nothing'; the steps are query, key, value, products"):
        ch.explain(query, query, query)["nothing"]


def test_what_is_written_to_the_inputs_later_changes_nothing():
    query, score = draw(3, 4), ch.Additive(4, 4, 2)
    module, x = ch.nn.MultiHeadAttention(4, 2), draw(1, 3, 4)
    of_call = ch.explain(query, query, query, score=score, bias=query @ query.T)
    for explanation, given, learnt in ((of_call, query, score), (ch.explain(module, x, x, x), x, module)):
        before = str(explanation)
        with torch.no_grad():
            given.zero_()
            for parameter in learnt.parameters():
                parameter.zero_()
        assert str(explanation) == before


def test_dropout_is_that_of_attention():
    query = draw(2, 2, 4, 3)
    torch.manual_seed(0)
    explanation = ch.explain(query, query, query, dropout_p=0.5)
    torch.manual_seed(0)
    output = ch.attention(query, query, query, dropout_p=0.5)
    torch.testing.assert_close(explanation["output"], output, rtol=1e-5, atol=1e-6)
    check_script(explanation)


@pytest.mark.parametrize(
    ("inputs", "options", "words"),
    [
        (2, {}, "missing a required argument: 'value'"),
        (0, {}, "missing a required argument: 'query'"),
        (3, {"maks": None}, "unexpected keyword argument 'maks'"),
        (4, {}, "too many positional arguments"),
    ],
)
def test_other_arguments_than_attention_s_are_an_error(inputs, options, words):
    with pytest.raises(TypeError, match=words):
        ch.explain(*[draw(2, 3)] * inputs, **options)


def test_arguments_by_name():
    x = draw(2, 3)
    module = ch.nn.MultiHeadAttention(3, 1)
    assert torch.equal(ch.explain(query=x, key=x, value=x)["output"], ch.explain(x, x, x)["output"])
    assert torch.equal(ch.explain(module, query=x, key=x, value=x)["result"], ch.explain(module, x, x, x)["result"])


class Manhattan(ch.extend.Score):
    """A score of one's own that says its steps."""

    def tile(self, query, key):
        return -(query.unsqueeze(-2) - key.unsqueeze(-3)).abs().sum(-1)

    def steps(self, query, key):
        apart = made("apart", "Number by number.", query.unsqueeze(-2) - key.unsqueeze(-3))
        return [apart, made("scores", "The farther apart, the lower.", -apart.abs().sum(-1))]


def test_a_score_of_one_s_own_says_its_steps_in_lines():
    query, key = draw(3, 4), draw(5, 4, seed=1)
    explanation = ch.explain(query, key, key, score=Manhattan(), gradients=True)
    check_script(explanation)
    formulas = {step.name: step.formula for step in explanation.steps}
    assert formulas["apart"] == "apart[i, j, d] = query[i, d] - key[j, d]"
    assert formulas["scores"] == "scores[i, j] = -(Σ_d |apart[i, j, d]|)"
    assert formulas["d_key"] == "d_key[j, d] = Σ_i -d_apart[i, j, d]"
    torch.testing.assert_close(explanation["d_key"], -explanation["d_apart"].sum(0))
