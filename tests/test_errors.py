"""Bad input: one clear error that says what disagreed, with shapes, and what to pass instead; nothing is changed."""

import pytest
import torch
from one_error import check_error

import clearhead as ch


def zeros(*shape, **options):
    return torch.zeros(*shape, **options)


X3, X4 = zeros(2, 5, 4), zeros(2, 8, 5, 4)

# what is called, the kind of error, and what its message must say
CASES = {
    "batches": (
        lambda: ch.attention(X3, zeros(3, 5, 4), zeros(3, 5, 4)),
        ch.ShapeError,
        ["leading", "equal or 1", "^"],
    ),
    "heads of key and value": (
        lambda: ch.attention(X4, zeros(2, 4, 5, 4), zeros(2, 2, 5, 4)),
        ch.ShapeError,
        ["key and value", "heads"],
    ),
    "a class where a mask is joined": (
        lambda: ch.Causal() & ch.Padding,
        ch.ClearheadError,
        ["Padding'", "an instance of a Mask"],
    ),
    "sinks that are no tensor": (
        lambda: ch.attention(X3[:, None], X3[:, None], X3[:, None], sinks=True),
        ch.ShapeError,
        ["sinks is a bool", "(1,)", "torch.zeros(1)"],
    ),
    "ragged lengths": (lambda: ch.Lengths([[1], [2, 3]]), ch.ClearheadError, ["valid_lens"]),
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
    "a bandwidth for each dimension": (
        lambda: ch.Gaussian(torch.nn.Parameter(torch.ones(4))),
        ch.ShapeError,
        ["(4,)", "one number"],
    ),
    "lengths for other rows of scores": (
        lambda: ch.masked_softmax(zeros(2, 3), [1, 2, 3]),
        ch.ShapeError,
        ["(1, 3)", "(1, 2)"],
    ),
    "an unknown engine": (lambda: ch.attention(X3, X3, X3, engine="x"), ch.UnsupportedError, ["'x'", "sdpa", "tiled"]),
    "ids for other keys": (
        lambda: ch.attention(X3, X3, X3, mask=ch.Documents.from_lengths([2, 2])),
        ch.ShapeError,
        ["(4,)", "(Lk,) = (5,)", "scores"],
    ),
    "prefixes for another batch": (
        lambda: ch.attention(X3, X3, X3, mask=ch.PrefixLM([1, 2, 3])),
        ch.ShapeError,
        ["(3,)", "(B,) = (2,)"],
    ),
    "w_v of two dimensions": (
        lambda: ch.Additive.from_weights(None, None, zeros(8, 1)),
        ch.ShapeError,
        ["w_v", "(8, 1)"],
    ),
    "an unknown order": (
        lambda: ch.Additive.from_concatenated(zeros(8, 8), zeros(8), order="qk"),
        ch.ClearheadError,
        ["'qk'", "key_query"],
    ),
    "a pool of another kind": (lambda: ch.weights(X3, X3).pool(2, "sum"), ch.ClearheadError, ["'sum'", "'max'"]),
    "an index out of range": (lambda: ch.weights(X3, X3)[2], ch.ClearheadError, ["out of range", "(2, 5, 5)"]),
    "too many indices": (lambda: ch.weights(X3, X3)[0, 0, 0, 0], ch.ClearheadError, ["too many"]),
    "a negative step": (lambda: ch.weights(X3, X3)[::-1], ch.ClearheadError, ["negative step", "flip"]),
    "reduce by a name": (lambda: ch.weights(X3, X3).reduce("entropy"), ch.ClearheadError, ["'entropy'", "Entropy()"]),
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
