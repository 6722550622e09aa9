"""Heads that an index of numbers chooses: lazy matrices of their own, of all kinds of matrices."""

import copy
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.inspection.matrix import LazyMatrix
from tests.inspection.test_matrix import difference, padded

ENTROPY, RECEIVED, TOPK = ch.reductions.Entropy(), ch.reductions.Received(), ch.reductions.TopK(2)
STATISTICS = [
    ENTROPY,
    RECEIVED,
    TOPK,
    ch.reductions.Pool(2, "mean"),
    ch.reductions.LogSumExp(),
    ch.reductions.MaxScore(),
    ch.reductions.MeanDistance(),
    ch.reductions.SinkShare(),
    ch.reductions.Mass([0, 1, 0, 1, 1]),
]


def tensor(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def weights(*lead, key_heads=None, **options):
    key_lead = lead if key_heads is None else (*lead[:-1], key_heads)
    return ch.weights(tensor(*lead, 5, 4), tensor(*key_lead, 5, 4, seed=1), **options)


def gradients(*lead):
    value, grad = tensor(*lead, 5, 3, seed=2), tensor(*lead, 5, 3, seed=3)
    return weights(*lead, mask=ch.Causal()).gradients(value, grad)


def recorded():
    block, x = ch.nn.MultiHeadAttention(8, 4, num_kv_heads=2), tensor(2, 5, 8, dtype=torch.float32)
    block(x, x, x, mask=ch.Causal())
    return block.attention_weights


MATRICES = {
    "heads": lambda: weights(2, 4, mask=ch.Causal(), bias=ch.ALiBi(4)),
    "groups": lambda: weights(2, 4, key_heads=2, mask=ch.Lengths([3, 5]), sinks=torch.zeros(4)),
    "masks that differ": lambda: weights(2, 4, mask=ch.DenseMask(tensor(2, 4, 5, 5, seed=4) > -0.5), align=0),
    "no heads": lambda: weights(3, mask=ch.SlidingWindow(before=1)),
    "five dimensions": lambda: weights(2, 3, 4, score=ch.Gaussian()),
    "a function": lambda: weights(2, 4, score=lambda query, key: torch.tanh(query @ key.mT)),
    "aligned by sequence": lambda: weights(2, 4, mask=ch.Causal(), align=torch.tensor([0, 1])),
    "arrays": lambda: ch.weights(tensor(2, 3, 5, 4).numpy(), tensor(2, 3, 5, 4, seed=1).numpy()),
    "a module": recorded,
    "padding": padded,
    "multiplied": lambda: padded(0.5),
    "gradients": lambda: gradients(2, 4),
    "gradients without heads": lambda: gradients(3),
    "difference": difference,
}


def close(found, expected):
    found, expected = (torch.as_tensor(each) for each in (found, expected))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5, equal_nan=True)


def draw_index(source, count):
    """Numbers, 0 or −1, and full slices for `count` leading dimensions, and an index with this meaning."""
    numbers = source.sample(range(count), source.randint(1, count))
    lead = tuple(source.choice([0, -1]) if d in numbers else slice(None) for d in range(count))
    full = slice(None)
    rest = source.choice([(), (...,), (full,), (full, full), (..., full)])
    last = lead[next(d for d, item in enumerate(lead) if item != full) :]
    return lead, source.choice([(*lead, *rest), (..., *last, full, full)])


@pytest.mark.parametrize("name", MATRICES)
def test_numbers_choose_heads_lazily(name):
    matrix = MATRICES[name]()
    dense, source = torch.as_tensor(matrix.dense()), random.Random(name)
    for _ in range(8):
        _, index = draw_index(source, matrix.ndim - 2)
        found, expected = matrix[index], dense[index]
        assert type(found) is type(matrix) and found.dtype == matrix.dtype, index
        assert found.shape == expected.shape and found.ndim == expected.ndim, index
        assert type(found.dense()) is type(matrix.dense())
        for same in (found.dense(), np.asarray(found), found + 0):
            close(same, expected)
        for dim in range(-2, found.ndim - 2):
            close(found.sum(dim), expected.sum(dim))
            close(found.amax(dim), expected.amax(dim))
        close(found[..., 1:3, 2], expected[..., 1:3, 2])
        assert isinstance(found[0], LazyMatrix) == (found.ndim > 2)
        close(found[0], expected[0])
        if hasattr(found, "scores"):
            close(found.scores(), torch.as_tensor(matrix.scores(index)))
            close(found @ found, expected @ expected)
            ones = torch.ones(5, dtype=found.dtype)
            close(found @ (ones.numpy() if name == "arrays" else ones), expected.sum(-1))


def test_what_is_a_matrix_and_what_a_tensor():
    w = weights(2, 4)
    for index in (0, (0, 3), (slice(None), 3), (..., 3, slice(None), slice(None)), (0, ...), (np.int64(1), 2, ...)):
        assert isinstance(w[index], LazyMatrix), index
    for index in (..., (), slice(None), None, (0, None), (slice(0, 1), 3), (0, 3, slice(0, 5)), (0, 3, 2), (..., 2)):
        assert isinstance(w[index], torch.Tensor), index
    assert isinstance(weights()[0], torch.Tensor) and isinstance(weights(3)[0], LazyMatrix)
    assert isinstance(w[0][3], LazyMatrix) and isinstance(w[0][3][2], torch.Tensor)


@pytest.mark.parametrize("name", [name for name in MATRICES if "gradients" not in name and name != "difference"])
def test_statistics_of_heads_are_those_of_the_whole(name):
    matrix, source = MATRICES[name](), random.Random(name)
    for one in STATISTICS:
        lead, index = draw_index(source, matrix.ndim - 2)
        whole, found = matrix.reduce(one), matrix[index].reduce(one)
        if not isinstance(one, ch.reductions.TopK):
            close(found, torch.as_tensor(whole)[lead])
            continue
        for part, all_of in zip(found, whole, strict=True):
            close(part, torch.as_tensor(all_of)[lead])
    lead, index = draw_index(source, matrix.ndim - 2)
    close(matrix[index].logsumexp(), torch.as_tensor(matrix.logsumexp())[lead])


@pytest.mark.parametrize("name", ["gradients", "gradients without heads"])
def test_sums_of_gradients_of_heads(name):
    matrix, source = MATRICES[name](), random.Random(name)
    for _ in range(4):
        lead, index = draw_index(source, matrix.ndim - 2)
        for positive in (False, True):
            close(matrix[index].by_key(positive), matrix.by_key(positive)[lead])
            close(matrix[index].by_query(positive), matrix.by_query(positive)[lead])


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("index", [0, (0, 3), (slice(None), 3)], ids=str)
def test_values_and_gradients_of_heads(index, key_heads):
    query, key = tensor(2, 4, 5, 4).requires_grad_(), tensor(2, key_heads, 5, 4, seed=1).requires_grad_()
    dense = ch.weights(query, key, mask=ch.Causal()).dense()[index]
    heads = ch.weights(query, key, mask=ch.Causal())[index]
    value = tensor(*dense.shape[:-2], 5, 3, seed=2).requires_grad_()
    uses = {
        "dense": (heads.dense(), dense),
        "product": (heads @ value, dense @ value),
        "entropy": (heads.entropy(), -(dense * dense.clamp(min=1e-300).log()).sum(-1)),
        "sum": (heads[..., 2:].sum(-1), dense[..., 2:].sum(-1)),
    }
    for name, pair in uses.items():
        close(*(each.detach() for each in pair))
        found, expected = (torch.autograd.grad(each.square().sum(), (query, key), retain_graph=True) for each in pair)
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want, msg=name)
    grad = tensor(*dense.shape[:-2], 5, 3, seed=3)
    close(heads.gradients(value.detach(), grad).dense(), grad @ value.detach().mT)


def test_heads_follow_what_they_are_computed_from():
    query, key = tensor(2, 4, 5, 4), tensor(2, 4, 5, 4, seed=1)
    head = ch.weights(query, key)[1, 2]
    head.dense()
    query.mul_(2)
    close(head.dense(), ch.weights(query, key).dense()[1, 2])
    block, x = ch.nn.DotProductAttention(), tensor(1, 3, 4)
    block(x, x, x)
    head = block.attention_weights[0]
    x.zero_()
    with pytest.raises(ch.ClearheadError, match="modified in place"):
        head.dense()


@pytest.mark.parametrize("name", ["heads", "a module", "padding", "multiplied", "gradients", "difference"])
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_of_heads(name, again):
    head = MATRICES[name]()[1, 2]
    copied = again(head)
    assert copied.shape == (5, 5)
    close(copied.dense(), head.dense())
    if hasattr(head, "entropy"):
        close(copied.entropy(), head.entropy())


def test_heads_in_transforms_and_in_compiled_code():
    query, key = tensor(2, 4, 5, 4), tensor(2, 4, 5, 4, seed=1)

    def head(query, key):
        return ch.weights(query, key, mask=ch.Causal())[1, 2].dense()

    want = head(query, key)
    close(torch.compile(head, fullgraph=True, backend="aot_eager")(query, key), want)
    several = torch.vmap(head)(torch.stack([query, -query]), torch.stack([key, key]))
    close(several[0], want)
    slope = torch.func.grad(lambda query: head(query, key)[4, 1])(query)
    assert slope[1, 2, 4].abs().sum() > 0 and slope[0].abs().sum() == 0


@pytest.mark.parametrize("use", [torch.exp, lambda w: torch.matmul(w, torch.ones(5, 2).double()), lambda w: 2 * w])
@pytest.mark.parametrize("index", [..., (1, 2)], ids=str)
def test_functions_of_torch_in_compiled_code(use, index):
    query, key = tensor(2, 4, 5, 4), tensor(2, 4, 5, 4, seed=1)

    def used(query, key):
        w = ch.weights(query, key)
        return use(w if index is ... else w[index])

    close(torch.compile(used, fullgraph=True, backend="eager")(query, key), used(query, key))


def test_pictures_of_heads_have_their_numbers():
    w = weights(2, 3)
    assert [axis.get_title() for axis in w[0].plot()] == ["head 0", "head 1", "head 2"]
    assert [axis.get_title() for axis in w[:, 1].plot()] == ["sequence 0", "sequence 1"]
    np.testing.assert_allclose(w[1, 2].plot().images[0].get_array(), w.dense()[1, 2])
    assert "<img" in w[1, 2]._repr_html_() or "<svg" in w[1, 2]._repr_html_()


def test_one_head_is_printed_with_its_numbers():
    long = ch.weights(tensor(2, 300, 4), tensor(2, 300, 4, seed=1))[1]
    assert repr(long) == f"{long._head()}:\n{long.dense()!r}"
    huge = ch.weights(torch.zeros(1, 6000, 4), torch.zeros(1, 6000, 4))[0]
    assert repr(huge) == huge._head()


MEMORY = """
import resource, sys, torch, clearhead as ch
torch.set_num_threads(1)
def used():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
def heads(length):
    query, key = torch.randn(2, 1, 4, length, 16).unbind()
    w = ch.weights(query, key, mask=ch.Causal())
    return {"topk": lambda: w[0, 3].topk(5), "dense": w[0, 3].dense, "part": lambda: w[0, 3, 1:],
            "gradients": w.gradients(query, query)[0, 3].dense}[sys.argv[1]]
heads(2000)()
look, before = heads(int(sys.argv[2])), used()
look()
print(used() - before)
"""


@pytest.mark.parametrize(
    ("look", "length", "most"),
    [("topk", 16384, 64), ("dense", 12288, 634), ("part", 12288, 634), ("gradients", 12288, 634)],
)
def test_memory_of_one_head(look, length, most):
    """MiB beyond the inputs: those of the result (576), and at most a tenth more."""
    ran = subprocess.run([sys.executable, "-c", MEMORY, look, str(length)], capture_output=True, text=True, check=True)
    assert float(ran.stdout) <= most
