"""Layouts, and nested tensors: each sequence is attended to as it would be alone, by the formula in plain PyTorch."""

import math

import numpy as np
import pytest
import torch

import clearhead as ch

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
LENGTHS = [3, 70, 0, 1, 9]
LONGEST = max(LENGTHS)
MORE = [5, 90, 4, 2, 9]
NOT_TOO_MANY = torch.rand(5, 8, LONGEST, LONGEST, generator=torch.Generator().manual_seed(1)) > 0.3

# the mask as clearhead takes it, and the same as a function of (sequence, head, query, key, number of keys)
MASKS = {
    "none": (None, lambda b, h, i, j: j >= 0),
    "causal": (ch.Causal(), lambda b, h, i, j: j <= i),
    "window": (ch.SlidingWindow(before=2, after=1), lambda b, h, i, j: (j >= i - 2) & (j <= i + 1)),
    "gaps": (~ch.SlidingWindow(before=2, after=1), lambda b, h, i, j: (j < i - 2) | (j > i + 1)),
    "lengths": (ch.Causal() & ch.Lengths([2, 50, 0, 1, 4]), lambda b, h, i, j: (j <= i) & (j < [2, 50, 0, 1, 4][b])),
    "function": (
        ch.MaskFunction(lambda b, h, i, j: (i + 2 * j + b + h) % 3 > 0),
        lambda b, h, i, j: (i + 2 * j + b + h) % 3 > 0,
    ),
    "bool": (NOT_TOO_MANY, lambda b, h, i, j: NOT_TOO_MANY[b, h][i, j]),
}
TABLE = torch.randn(5, 8, LONGEST, LONGEST, generator=torch.Generator().manual_seed(2))
BIASES = {
    "none": (None, lambda b, h, i, j: 0.0 * (i + j)),
    "alibi": (ch.ALiBi(8), lambda b, h, i, j: -(2.0 ** -(h + 1)) * (i - j).abs()),
    "dense": (ch.DenseBias(TABLE), lambda b, h, i, j: TABLE[b, h][i, j]),
    "function": (ch.BiasFunction(lambda b, h, i, j: 0.1 * (i - j + b - h)), lambda b, h, i, j: 0.1 * (i - j + b - h)),
}


def sequences(lengths, heads, width, dtype=torch.float32, seed=0):
    """Of each sequence (L, H, D)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, heads, width, generator=generator, dtype=dtype).requires_grad_() for n in lengths]


def nested(parts, layout=torch.jagged):
    return torch.nested.as_nested_tensor(parts, layout=layout)


def formula(query, key, value, number, allowed, added, offset=0):
    """One sequence, (L, H, D) each: softmax of the scores of the allowed keys, times the values."""
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for head in range(query.shape[1]):
        i, j = torch.arange(len(query))[:, None], torch.arange(len(key))[None]
        scores = query[:, head] @ key[:, head // groups].T / math.sqrt(query.shape[-1])
        scores = scores + added(number, head, i + offset, j)
        keep = allowed(number, head, i + offset, j).expand(scores.shape)
        weights = torch.where(keep, scores.masked_fill(~keep, -1e30).softmax(-1), 0.0)
        outputs.append(weights @ value[:, head // groups])
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("mask", MASKS)
def test_each_sequence_is_as_it_is_alone(mask, bias):
    check(MASKS[mask], BIASES[bias], LENGTHS, LENGTHS)


@pytest.mark.parametrize(("align", "mask", "bias"), [
    ("lower_right", "causal", "alibi"),
    ("upper_left", "window", "none"),
    (1, "causal", "alibi"),
    (None, "none", "none"),
])  # fmt: skip
def test_more_keys_than_queries(align, mask, bias):
    offset = (lambda n: MORE[n] - LENGTHS[n]) if align == "lower_right" else (lambda n: align if align == 1 else 0)
    check(MASKS[mask], BIASES[bias], LENGTHS, MORE, offset, align=align)


def check(mask, bias, lengths, more, offset=lambda n: 0, dtype=torch.float32, layout="BLHD", **given):
    queries, keys = sequences(lengths, 8, 4, dtype), sequences(more, 2, 4, dtype, 1)
    values = sequences(more, 2, 5, dtype, 2)
    query, key, value = (nested(parts) for parts in (queries, keys, values))
    if layout == "BHLD":
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    output = ch.attention(query, key, value, mask=mask[0], bias=bias[0], layout=layout, **given)
    assert output.shape[:3] == query.shape[:3]  # the length that varies is the query's own: they can be added
    found = (output.transpose(1, 2) if layout == "BHLD" else output).unbind()
    wanted = [
        formula(q, k, v, n, mask[1], bias[1], offset(n))
        for n, (q, k, v) in enumerate(zip(queries, keys, values, strict=True))
    ]
    every = [*queries, *keys, *values]
    grads = [torch.randn_like(tensor) for tensor in wanted]
    ours, theirs = (
        torch.autograd.grad(sum((o * g).sum() for o, g in zip(outputs, grads, strict=True)), every)
        for outputs in (found, wanted)
    )
    for one, other in zip([*found, *ours], [*wanted, *theirs], strict=True):
        torch.testing.assert_close(one, other, atol=3e-6, rtol=1e-4)
    sums = (torch.tensor([0, *counts]).cumsum(0) for counts in (lengths, more))
    documents, masks = ch.Documents.from_cu_seqlens(*sums), mask[0]
    masks = ch.DenseMask(masks) if isinstance(masks, torch.Tensor) else masks
    rows = [torch.cat(parts) for parts in (queries, keys, values)]
    packed = ch.attention(
        *rows, mask=documents if masks is None else masks & documents, bias=bias[0], layout="LHD", **given
    )
    theirs = torch.autograd.grad(packed, every, torch.cat(grads))
    for one, other in zip([packed, *theirs], [torch.cat(wanted), *ours], strict=True):
        torch.testing.assert_close(one, other, atol=3e-6, rtol=1e-4)


@pytest.mark.parametrize("layout", ["BLHD", "BHLD"])
@pytest.mark.parametrize("engine", ["native", "tiled", "sdpa", "reference"])
def test_every_engine(engine, layout):
    check(MASKS["causal"], BIASES["none"], LENGTHS, LENGTHS, engine=engine, layout=layout)


def test_other_dtypes_scores_and_forms():
    check(MASKS["gaps"], BIASES["alibi"], LENGTHS, LENGTHS, dtype=torch.float64)
    parts = sequences([3, 5], 1, 4)
    flat = [part[:, 0] for part in parts]
    wanted = [formula(p, p, p, 0, MASKS["causal"][1], BIASES["none"][1])[:, 0] for p in parts]
    for layout in (torch.jagged, torch.strided):
        x = nested(flat, layout)
        output = ch.attention(x, x, x, mask=ch.Causal())
        assert output.layout == layout
        for found, one in zip(output.unbind(), wanted, strict=True):
            torch.testing.assert_close(found, one, atol=1e-6, rtol=1e-5)
        torch.autograd.grad(sum(part.sum() for part in output.unbind()), flat)
    score = ch.Additive(4, 4, hidden_dim=3)
    x = nested(flat)
    for found, one in zip(ch.attention(x, x, x, score=score).unbind(), flat, strict=True):
        torch.testing.assert_close(found, ch.attention(one, one, one, score=score, engine="reference"))


def test_sequences_with_room_between_them():
    padded = torch.randn(3, 6, 4)
    begin, lengths = torch.tensor([0, 2, 1]), torch.tensor([3, 4, 1])
    x = torch.nested.narrow(padded, 1, begin, lengths, layout=torch.jagged)
    output = ch.attention(x, x, x)
    for row, first, count, found in zip(padded, begin, lengths, output.unbind(), strict=True):
        one = row[first : first + count]
        torch.testing.assert_close(found, ch.attention(one, one, one, engine="reference"))


def test_weights_and_plan_of_nested_tensors():
    parts = [part.transpose(0, 1) for part in sequences([3, 5], 2, 4)]
    x = nested([part.transpose(0, 1) for part in parts]).transpose(1, 2)
    w = ch.weights(x, x, mask=ch.Causal())
    assert w.shape == (1, 2, 8, 8)
    torch.testing.assert_close(w[0, :, 3:, 3:], ch.weights(parts[1], parts[1], mask=ch.Causal())[:])
    assert not w[0, :, 3:, :3].any()
    assert ch.plan(x, x, x, mask=ch.Causal()).pairs == 2 * 64
    assert w.entropy().shape == (1, 2, 8)


@pytest.mark.parametrize("numpy", [False, True])
def test_heads_after_the_length(numpy):
    query, key, value = torch.randn(2, 5, 4, 6), torch.randn(2, 7, 2, 6), torch.randn(2, 7, 2, 3)
    heads_first = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*heads_first, enable_gqa=True)
    given = [tensor.numpy() for tensor in (query, key, value)] if numpy else (query, key, value)
    found = ch.attention(*given, layout="BLHD")
    assert isinstance(found, np.ndarray) == numpy and found.shape == (2, 5, 4, 3)
    torch.testing.assert_close(torch.as_tensor(found), wanted.transpose(1, 2))
    torch.testing.assert_close(
        torch.as_tensor(ch.weights(*given[:2], layout="BLHD")[:]), ch.weights(*heads_first[:2])[:]
    )


@pytest.mark.parametrize("layout", ["BLHD", "LHD"])
def test_the_steps_of_any_layout(layout):
    query, key, value = (torch.randn(5, 2, 6) if layout == "LHD" else torch.randn(2, 5, 2, 6) for _ in range(3))
    found = ch.explain(query, key, value, mask=ch.Causal(), layout=layout)["output"]
    wanted = ch.attention(query, key, value, mask=ch.Causal(), layout=layout).transpose(-3, -2)
    torch.testing.assert_close(found, wanted.reshape(found.shape))


def test_statistics_of_packed_sequences_count_in_each():
    cu_q, cu_k = torch.tensor([0, 2, 3]), torch.tensor([0, 3, 5])
    query, key = torch.randn(3, 4), torch.randn(5, 4)
    mask = ch.Causal() & ch.Documents.from_cu_seqlens(cu_q, cu_k)
    found = ch.weights(query, key, mask=mask, align="lower_right").reduce(ch.reductions.MeanDistance())
    for (a, b), (c, d) in zip(((0, 2), (2, 3)), ((0, 3), (3, 5)), strict=True):
        one = ch.weights(query[a:b], key[c:d], mask=ch.Causal(), align="lower_right")
        torch.testing.assert_close(found[a:b], one.reduce(ch.reductions.MeanDistance()))
    with pytest.raises(ch.ClearheadError, match="document's queries and keys differ"):
        ch.weights(query, key, mask=ch.Documents.from_cu_seqlens(cu_q, cu_k)).reduce(ch.reductions.MeanDistance())


def test_compiled_code_takes_packed_sequences():
    query, key = torch.randn(3, 2, 4), torch.randn(5, 2, 4)
    documents = ch.Documents.from_cu_seqlens([0, 2, 3], [0, 3, 5])

    def call(query, key):
        mask = (ch.Causal() | ch.MaskFunction(lambda b, h, i, j: i == b + j)) & documents
        return ch.attention(query, key, key, mask=mask, align="lower_right", bias=ch.ALiBi(2), layout="LHD")

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(query, key), call(query, key))


def test_room_between_sequences_has_no_gradient():
    """What lies between the sequences is NaN, and reaches neither output nor gradients."""
    values = torch.randn(12, 4, 8).requires_grad_()
    starts, lengths = torch.tensor([0, 4, 6, 12]), torch.tensor([3, 0, 5])
    inside = torch.tensor([0, 1, 2, 6, 7, 8, 9, 10])
    with torch.no_grad():
        values[[3, 4, 5, 11]] = torch.nan
    nested = torch.nested.nested_tensor_from_jagged(values, starts, lengths=lengths)
    grad = torch.randn(8, 4, 8)
    found = ch.attention(nested, nested, nested, layout="BLHD", mask=ch.Causal()).values()
    (slope,) = torch.autograd.grad(found, values, grad)
    packed = values.detach()[inside].requires_grad_()
    parts = torch.split(packed, [3, 0, 5])
    expected = torch.cat([formula(x, x, x, 0, MASKS["causal"][1], BIASES["none"][1]) for x in parts if len(x)])
    torch.testing.assert_close(found, expected)
    (expected_slope,) = torch.autograd.grad(expected, packed, grad)
    torch.testing.assert_close(slope[inside], expected_slope)
    assert not slope[[3, 4, 5, 11]].any()


def test_a_nested_tensor_without_sequences_is_refused():
    none = torch.nested.as_nested_tensor([])
    with pytest.raises(ch.ShapeError, match="one or more"):
        ch.attention(none, none, none)


X = torch.zeros(2, 3, 4, 8)
JAGGED = torch.nested.as_nested_tensor([torch.zeros(2, 3, 8), torch.zeros(3, 3, 8)], layout=torch.jagged)
OTHER = torch.nested.as_nested_tensor([torch.zeros(2, 3, 8), torch.zeros(4, 3, 8)], layout=torch.jagged)
THREE = torch.nested.as_nested_tensor([torch.zeros(2, 3, 8)] * 3, layout=torch.jagged)


@pytest.mark.parametrize(("given", "options", "said"), [
    ((X, X, X), {"layout": "LBHD"}, "expected 'BHLD'"),
    ((X, X, X), {"layout": 3}, "expected 'BHLD'"),
    ((X, X, X), {"layout": "LHD"}, "three dimensions"),
    ((X[0], X[0], X[0]), {"layout": "BLHD"}, "four dimensions"),
    ((3, X, X), {"layout": "BLHD"}, "type int"),
    ((JAGGED, JAGGED, OTHER), {"layout": "BLHD"}, "sequences of different lengths"),
    ((JAGGED, THREE, THREE), {"layout": "BLHD"}, "2 sequences and key has 3"),
    ((JAGGED, JAGGED, JAGGED), {"layout": "BLHD", "mask": ch.Lengths([1, 2, 3])}, "Lengths"),
    ((JAGGED, JAGGED, JAGGED), {"layout": "BLHD", "align": "left"}, "align"),
])  # fmt: skip
def test_what_is_refused(given, options, said):
    with pytest.raises(ch.ClearheadError, match=said):
        ch.attention(*given, **options)


def test_transforms_say_that_they_cannot():
    edges, values = torch.tensor([0, 3, 8]), torch.randn(8, 2, 4)
    rows = lambda v: torch.nested.nested_tensor_from_jagged(v, edges).transpose(1, 2)
    whole = rows(values)
    called = lambda q: ch.attention(q, whole, whole).values().sum()
    alike = lambda v: ch.attention(rows(v), rows(v), rows(v)).values().sum()
    constant = lambda s: s * called(whole)
    for run, at in ((called, whole), (alike, values), (constant, torch.ones(()))):
        with pytest.raises(ch.UnsupportedError, match="cannot use them"):
            torch.func.grad(run)(at)


def test_compiled_code_says_that_it_cannot():
    def call(x):
        return ch.attention(x, x, x, layout="BLHD")

    with pytest.raises(Exception, match="pass padded tensors"):
        torch.compile(call, backend="eager", fullgraph=True)(JAGGED)
    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(X), call(X))
