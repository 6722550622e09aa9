"""Bad input: one clear error that says what disagreed, with shapes, and what to pass instead; nothing is changed."""

import pytest
import torch
from one_error import check_error

import clearhead as ch


def zeros(*shape, **options):
    return torch.zeros(*shape, **options)


X3, X4 = zeros(2, 5, 4), zeros(2, 8, 5, 4)
UNEQUAL = ch.Documents.from_cu_seqlens([0, 2, 5], [0, 3, 5])

# what is called, the kind of error, and what its message must say
CASES = {
    "lengths of key and value": (
        lambda: ch.attention(X3, X3, zeros(2, 6, 4)),
        ch.ShapeError,
        ["Lk", "key", "value", "6", "^"],
    ),
    "batches": (
        lambda: ch.attention(X3, zeros(3, 5, 4), zeros(3, 5, 4)),
        ch.ShapeError,
        ["leading", "equal or 1", "^"],
    ),
    "one vector": (lambda: ch.attention(zeros(4), X3, X3), ch.ShapeError, ["query", "(4,)", "query[None]"]),
    "widths for Dot": (
        lambda: ch.attention(X3, zeros(2, 5, 6), X3),
        ch.ShapeError,
        ["width E", "Bilinear", "query_dim=4", "^"],
    ),
    "widths for Cosine": (lambda: ch.attention(X3, zeros(2, 5, 6), X3, score=ch.Cosine()), ch.ShapeError, ["Cosine"]),
    "widths for Gaussian": (lambda: ch.Gaussian()(X3, zeros(2, 5, 6)), ch.ShapeError, ["Gaussian"]),
    "widths for Additive": (
        lambda: ch.attention(X3, X3, X3, score=ch.Additive(4, 6, 8)),
        ch.ShapeError,
        ["key has width 4", "width 6", "key_dim=4"],
    ),
    "widths for Bilinear": (lambda: ch.Bilinear(3, 4)(X3, X3), ch.ShapeError, ["query has width 4", "query_dim=4"]),
    "heads that do not divide": (
        lambda: ch.attention(X4, zeros(2, 3, 5, 4), zeros(2, 3, 5, 4)),
        ch.ShapeError,
        ["8 query heads", "3 key heads", "divide", "transpose(1, 2)"],
    ),
    "heads of key and value": (
        lambda: ch.attention(X4, zeros(2, 4, 5, 4), zeros(2, 2, 5, 4)),
        ch.ShapeError,
        ["key and value", "heads"],
    ),
    "a mask that does not broadcast": (
        lambda: ch.attention(X3, X3, X3, mask=torch.ones(5, 6, dtype=torch.bool)),
        ch.ShapeError,
        ["(5, 6)", "broadcast", "scores", "^", "Padding"],
    ),
    "a 3-D mask on heads": (
        lambda: ch.attention(X4, X4, X4, mask=torch.ones(8, 5, 5, dtype=torch.bool)),
        ch.ShapeError,
        ["3 dimensions", "mask[:, None]", "mask[None]"],
    ),
    "a 3-D float mask on heads": (
        lambda: ch.attention(X4, X4, X4, mask=zeros(2, 5, 5)),
        ch.ShapeError,
        ["3 dimensions"],
    ),
    "lengths without a batch axis": (
        lambda: ch.Lengths([3, 6]).dense(zeros(6, 4), zeros(6, 4)),
        ch.ShapeError,
        ["(2,)", "no batch axis"],
    ),
    "a class where a mask is joined": (
        lambda: ch.Causal() & ch.Padding,
        ch.ClearheadError,
        ["the class Padding", "an instance, Padding(...)"],
    ),
    "no mask where one is joined": (lambda: ch.Causal() & None, ch.ClearheadError, ["right", "None: leave it out"]),
    "a function where a mask is joined": (
        lambda: (lambda b, h, i, j: i >= j) | ch.Causal(),
        ch.ClearheadError,
        ["left", "a function", "MaskFunction(rule)"],
    ),
    "sinks that are no tensor": (
        lambda: ch.attention(X3[:, None], X3[:, None], X3[:, None], sinks=True),
        ch.ClearheadError,
        ["sinks is True", "(1,)", "torch.zeros(1)"],
    ),
    "the settings of a rotary scaling": (
        lambda: ch.nn.RotaryEmbedding(8, scaling={"rope_type": "yarn", "factor": 4.0}),
        ch.ClearheadError,
        ["rope_type", "RotaryScaling.yarn(4, original_length=8192)"],
    ),
    "negative lengths": (lambda: ch.Lengths([2, -1]), ch.ClearheadError, ["-1", "valid_lens"]),
    "ragged lengths": (lambda: ch.Lengths([[1], [2, 3]]), ch.ClearheadError, ["valid_lens"]),
    "lengths of another batch": (
        lambda: ch.attention(X3, X3, X3, mask=ch.Lengths([1, 2, 3])),
        ch.ShapeError,
        ["(3,)", "(2,)", "scores"],
    ),
    "negative padding": (lambda: ch.Padding(torch.tensor([[-2, 1]])), ch.ClearheadError, ["for a word", "Lengths"]),
    "padding of another length": (
        lambda: ch.attention(X3, X3, X3, mask=ch.Padding(torch.ones(2, 6, dtype=torch.long))),
        ch.ShapeError,
        ["(2, 6)", "(2, 5)"],
    ),
    "a wrong alignment": (
        lambda: ch.attention(X3, X3, X3, align="left"),
        ch.ClearheadError,
        ["'left'", "upper_left"],
    ),
    "an alignment for another batch": (
        lambda: ch.attention(X3, X3, X3, mask=ch.Causal(), align=torch.tensor([0, 1, 2])),
        ch.ShapeError,
        ["align", "(3,)", "batch is 2"],
    ),
    "sums of lengths of other documents": (
        lambda: ch.Documents.from_cu_seqlens([0, 3], [0, 2, 3]),
        ch.ShapeError,
        ["cu_q has 2", "cu_k 3"],
    ),
    "documents of other queries": (
        lambda: ch.attention(X3, X3, X3, mask=ch.Documents.from_cu_seqlens([0, 2, 4], [0, 3, 5])),
        ch.ShapeError,
        ["cu_q ends at 4", "5 queries"],
    ),
    "padding of inputs whose length is second": (
        lambda: ch.attention(*[zeros(2, 10, 4, 8)] * 3, mask=ch.Padding(torch.ones(2, 10).bool())),
        ch.ShapeError,
        ["(2, 10)", "tensor.transpose(1, 2)"],
    ),
    "a bandwidth for each dimension": (
        lambda: ch.Gaussian(torch.nn.Parameter(torch.ones(4))),
        ch.ShapeError,
        ["(4,)", "one number"],
    ),
    "lengths for other rows of scores": (
        lambda: ch.masked_softmax(zeros(2, 3), [1, 2, 3]),
        ch.ShapeError,
        ["(3,)", "(2, 3)", "(2,)"],
    ),
    "all of much": (
        lambda: ch.weights(zeros(1, 8, 9000, 4), zeros(1, 8, 9000, 4))[...],
        ch.ClearheadError,
        ["2.41 GiB", "256 MiB", "max_bytes=None"],
    ),
    "a negative window": (lambda: ch.SlidingWindow(before=-1), ch.ClearheadError, ["before", "-1"]),
    "an unknown engine": (lambda: ch.attention(X3, X3, X3, engine="x"), ch.UnsupportedError, ["'x'", "sdpa", "tiled"]),
    "an engine that can't": (
        lambda: ch.attention(X3, X3, X3, score=ch.Gaussian(), engine="sdpa"),
        ch.UnsupportedError,
        ["sdpa", "sq_diff", "no dot product"],
    ),
    "weights of sdpa": (lambda: ch.weights(X3, X3, engine="sdpa"), ch.UnsupportedError, ["weights"]),
    "softcap on sdpa": (
        lambda: ch.attention(X3, X3, X3, score=ch.Dot(softcap=5), engine="sdpa"),
        ch.UnsupportedError,
        ["softcap"],
    ),
    "dropout out of range": (
        lambda: ch.attention(X3, X3, X3, dropout_p=1.5),
        ch.ClearheadError,
        ["1.5", "probability"],
    ),
    "ragged ids": (lambda: ch.Documents([[0, 0], [1]]), ch.ClearheadError, ["Documents: ids", "no array of integers"]),
    "ids for other keys": (
        lambda: ch.attention(X3, X3, X3, mask=ch.Documents.from_lengths([2, 2])),
        ch.ShapeError,
        ["(4,)", "(Lk,) = (5,)", "scores"],
    ),
    "documents without an alignment": (
        lambda: ch.attention(X3, zeros(2, 7, 4), zeros(2, 7, 4), mask=ch.Documents.from_lengths([3, 4])),
        ch.ClearheadError,
        ["Documents", "no alignment", "lower_right"],
    ),
    "a negative document": (
        lambda: ch.Documents.from_lengths([2, -1]),
        ch.ClearheadError,
        ["-1", "a length is from 0"],
    ),
    "prefixes for another batch": (
        lambda: ch.attention(X3, X3, X3, mask=ch.PrefixLM([1, 2, 3])),
        ch.ShapeError,
        ["(3,)", "(B,) = (2,)"],
    ),
    "a negative prefix": (lambda: ch.PrefixLM(-1), ch.ClearheadError, ["PrefixLM: lengths", "-1"]),
    "a rule that gives another shape": (
        lambda: ch.attention(X3, X3, X3, mask=ch.MaskFunction(lambda b, h, i, j: torch.ones(7, dtype=torch.bool))),
        ch.ShapeError,
        ["(7,)", "(2, 1, 5, 5)"],
    ),
    "a bias that does not broadcast": (
        lambda: ch.attention(X3, X3, X3, bias=zeros(5, 6)),
        ch.ShapeError,
        ["bias", "(5, 6)", "scores", "^"],
    ),
    "a class as bias": (lambda: ch.attention(X4, X4, X4, bias=ch.ALiBi), ch.ClearheadError, ["class ALiBi"]),
    "heads of ALiBi": (
        lambda: ch.attention(X4, X4, X4, bias=ch.ALiBi(4)),
        ch.ShapeError,
        ["4 heads", "(2, 8, 5, 5)", "ALiBi(8)"],
    ),
    "heads of RelativeBias": (
        lambda: ch.attention(X4, X4, X4, bias=ch.RelativeBias(4)),
        ch.ShapeError,
        ["4 heads", "(2, 8, 5, 5)", "RelativeBias(8)"],
    ),
    "alignment of a bias": (
        lambda: ch.attention(X4, zeros(2, 8, 7, 4), zeros(2, 8, 7, 4), bias=ch.ALiBi(8)),
        ch.ClearheadError,
        ["ALiBi", "no alignment", "upper_left", "lower_right"],
    ),
    "a bias by distance over unequal documents": (
        lambda: ch.attention(X4, X4, X4, mask=UNEQUAL, bias=ch.ALiBi(8)),
        ch.ClearheadError,
        ["ALiBi", "document's queries and keys differ", 'align="lower_right"'],
    ),
    "sinks and heads": (
        lambda: ch.attention(X4, X4, X4, sinks=zeros(4)),
        ch.ShapeError,
        ["(4,)", "8 heads", "(8,)"],
    ),
    "a score that is none": (lambda: ch.attention(X3, X3, X3, score="dot"), ch.ClearheadError, ["str", "Dot()"]),
    "a score of the wrong shape": (
        lambda: ch.attention(X3, X3, X3, score=lambda q, k: q),
        ch.ShapeError,
        ["tile gave", "expected"],
    ),
    "softcap": (lambda: ch.Dot(softcap=0.0), ch.ClearheadError, ["softcap", "above 0"]),
    "temperature": (lambda: ch.Cosine(temperature=-1), ch.ClearheadError, ["temperature"]),
    "bandwidth": (lambda: ch.Gaussian(float("nan")), ch.ClearheadError, ["bandwidth"]),
    "W_q turned": (
        lambda: ch.Additive.from_weights(zeros(4, 8), None, zeros(8)),
        ch.ShapeError,
        ["W_q", "w_v", "W_q.T"],
    ),
    "w_v of two dimensions": (
        lambda: ch.Additive.from_weights(None, None, zeros(8, 1)),
        ch.ShapeError,
        ["w_v", "(8, 1)"],
    ),
    "an odd concatenation": (lambda: ch.Additive.from_concatenated(zeros(8, 7), zeros(8)), ch.ShapeError, ["key_dim"]),
    "an unknown order": (
        lambda: ch.Additive.from_concatenated(zeros(8, 8), zeros(8), order="qk"),
        ch.ClearheadError,
        ["'qk'", "key_query"],
    ),
    "a pool of 0": (lambda: ch.weights(X3, X3).pool(0), ch.ClearheadError, ["size"]),
    "a pool of another kind": (lambda: ch.weights(X3, X3).pool(2, "sum"), ch.ClearheadError, ["'sum'", "'max'"]),
    "an index out of range": (lambda: ch.weights(X3, X3)[2], ch.ClearheadError, ["out of range", "(2, 5, 5)"]),
    "too many indices": (lambda: ch.weights(X3, X3)[0, 0, 0, 0], ch.ClearheadError, ["too many"]),
    "a negative step": (lambda: ch.weights(X3, X3)[::-1], ch.ClearheadError, ["negative step", "flip"]),
    "reduce by a name": (lambda: ch.weights(X3, X3).reduce("entropy"), ch.ClearheadError, ["'entropy'", "Entropy()"]),
    "distance without alignment": (
        lambda: ch.weights(X3, zeros(2, 7, 4)).reduce(ch.reductions.MeanDistance()),
        ch.ClearheadError,
        ["MeanDistance", "lower_right"],
    ),
    "a shape by tuple": (
        lambda: ch.check_shape(zeros(2, 3, 6), (2, 4, 6)),
        ch.ShapeError,
        ["dimension 1", "expected   2  4  6", "got        2  3  6", "^"],
    ),
    "a shape by names": (lambda: ch.check_shape(zeros(2, 3), "B B"), ch.ShapeError, ["B = 2", "3"]),
    "dimensions": (lambda: ch.check_shape(zeros(2, 3), "B Lq E"), ch.ShapeError, ["3 dimensions", "got 2"]),
    "softmax over no dimension": (lambda: ch.masked_softmax(zeros(2, 3), dim=2), ch.ClearheadError, ["dim is 2"]),
    "a watch on no model": (lambda: ch.watch(3).__enter__(), ch.ClearheadError, ["torch.nn.Module", "int"]),
    "lengths above Lk": (
        lambda: ch.attention(X3, X3, X3, mask=ch.Lengths([2, 6])),
        ch.ClearheadError,
        ["6", "5 keys", "(2,)"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_clear_error(name):
    check_error(*CASES[name])


def test_lengths_beside_heads_are_not_told_that_there_is_no_batch():
    x = zeros(2, 4, 5, 8)
    with pytest.raises(ch.ShapeError) as error:
        ch.attention(x, x, x, valid_lens=[1, 2, 3])
    assert "(B,) = (2,)" in str(error.value)
    assert "no batch axis" not in str(error.value)


def test_shapes_are_aligned_in_columns():
    with pytest.raises(ch.ShapeError) as caught:
        ch.attention(zeros(2, 8, 10, 64), zeros(2, 8, 12, 32), zeros(2, 8, 12, 32))
    rows = [line for line in str(caught.value).splitlines() if line.startswith("    ")]
    assert rows == ["    query   2  8  10  64", "    key     2  8  12  32", "                      ^^"]


def test_inputs_of_a_refused_call_are_unchanged():
    x, lens = torch.rand(2, 5, 4), torch.tensor([2, 9])
    before = x.clone(), lens.clone()
    with pytest.raises(ch.ClearheadError):
        ch.attention(x, x, x, mask=ch.Lengths(lens))
    assert torch.equal(x, before[0]) and torch.equal(lens, before[1])


def test_an_engine_asked_for_never_falls_back():
    x = torch.rand(1, 5, 4)
    for engine in ("sdpa", "tiled", "reference"):
        assert ch.plan(x, x, x, engine=engine).engine == engine
    with pytest.raises(ch.UnsupportedError):
        ch.plan(x, x, x, score=ch.Additive(4, 4, 2), engine="sdpa")


@pytest.mark.parametrize("engine", [None, "native", "sdpa", "tiled", "reference"])
def test_no_key_heads_for_some_query_heads(engine):
    query, key = torch.randn(2, 3, 5, 8), torch.randn(2, 0, 5, 8)
    for options in ({}, {"mask": ch.Causal()}):
        with pytest.raises(ch.ShapeError, match="3 query heads cannot share 0 key heads"):
            ch.attention(query, key, key, engine=engine, **options)


@pytest.mark.parametrize("place", range(3))
def test_layouts_that_are_not_dense(place):
    for change in (torch.Tensor.to_sparse, torch.Tensor.to_mkldnn):
        tensors = [torch.randn(2, 3, 5, 8) for _ in range(3)]
        tensors[place] = change(tensors[place])
        for options in ({}, {"mask": ch.Causal()}):
            with pytest.raises(ch.ClearheadError, match="has the layout"):
                ch.attention(*tensors, **options)
